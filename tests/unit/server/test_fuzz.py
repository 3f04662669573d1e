"""Whatever comes: the scanner, the JSON path, the reader of heads, and the reader of JPEG headers, on mutated input.

Seconds here; minutes with `python -m pytest tests/unit/server/test_fuzz.py --hypothesis-profile=long`.
"""

import asyncio
import itertools
import json
import re
from types import SimpleNamespace
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image
from uvicorn import Config
from uvicorn.server import ServerState

from engine.config import EngineConfig
from engine.plain_jpeg import has_end, has_too_many_scans, is_jpeg, parse_plain_jpeg
from server.errors import RequestError
from server.http.connection import MAX_HEAD_BYTES, ConnectionLimiter
from server.http.direct import DirectProtocol
from server.http.scan import Scanner
from server.http.validate import read_object
from server.processor.pixels import read_header
from tests.unit.server.pictures import PLAIN

Edit = tuple[int, int, bytes]
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 9), st.binary(max_size=6)), max_size=6)
CUTS = st.lists(st.integers(0, 10**6), max_size=6)


def mutated(data: bytes, edits: list[Edit]) -> bytes:
    """Pieces of `data` cut out and others put in."""
    for place, length, piece in edits:
        start = place % (len(data) + 1)
        data = data[:start] + piece + data[start + length :]
    return data


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


URI = "data:image/png;base64," + "QUJD" * 60
DOCUMENTS = [
    json.dumps({"messages": [{"content": [{"image_url": {"url": URI}}, {"text": 'a "quoted" \\ text'}]}], "data": "QUJD" * 60}),
    json.dumps({"a": [URI, {"data": URI}, "data:", "data", {URI: 1}], "é": "\u2028 ü \\/"}, ensure_ascii=False),
    '{"x": "data:image\\/png;base64,QU\\/JD\\"", "data" : "' + "A" * 300 + '"}',
]


@given(st.sampled_from(DOCUMENTS), EDITS, CUTS)
def test_the_scanner_loses_nothing(document: str, edits: list[Edit], cuts: list[int]) -> None:
    """Red if a body is another one behind the scanner, if pieces change what it finds, or if anything makes it fail."""
    body = mutated(document.encode(), edits)
    found = []
    for pieces in (cut(body, cuts), [body]):
        scanner = Scanner("nonce", 1000)
        for piece in pieces:
            scanner.feed(piece)
        assert scanner.json(memoryview(body), keep=()) == body
        found.append([(reference.mime, reference.offset, reference.length) for reference in scanner.references])
        assert all(offset + length <= len(body) for _, offset, length in found[-1])
    assert found[0] == found[1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('a"[{:\\', max_size=4), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=5), EDITS)
@example({}, [(0, 9, b'{"a":\xff}')])
def test_json_is_read_or_refused(value: dict[str, Any], edits: list[Edit]) -> None:
    """Red if a body is anything but its value or a client's error."""
    assert read_object(json.dumps(value).encode()) == value
    body = mutated(json.dumps(value, ensure_ascii=False).encode(), edits)
    try:
        read = read_object(body)
    except RequestError as error:
        assert error.info.status in (400, 413)
    else:
        assert isinstance(read, dict)


class Wire(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answers with the method, the path and the body."""
    body = b""
    while (message := await receive())["type"] == "http.request":
        body += message["body"]
        if not message["more_body"]:
            break
    answer = f"{scope['method']} {scope['path']} {len(body)}".encode("utf-8", "replace")
    head = {"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(len(answer)).encode())]}
    await send(head)
    await send({"type": "http.response.body", "body": answer})


async def converse(pieces: list[bytes]) -> bytes:
    """What a connection answers to these packets."""
    config = Config(echo, ws="none", lifespan="off", log_config=None, proxy_headers=False, access_log=False)
    config.load()
    of_uvicorn: dict[str, Any] = {"config": config, "server_state": ServerState(), "app_state": {}, "_loop": asyncio.get_running_loop()}
    protocol = DirectProtocol(ConnectionLimiter(EngineConfig()), **of_uvicorn)
    protocol.logger = SimpleNamespace(level=100, warning=lambda *_: None, error=lambda *arguments, **_: arguments[0])  # type: ignore[assignment]
    wire = Wire()
    protocol.connection_made(wire)
    for piece in pieces:
        if not wire.closed:
            protocol.data_received(piece)
            assert len(protocol._head) <= MAX_HEAD_BYTES
        for _ in range(4):
            await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    if not wire.closed:
        protocol.connection_lost(None)
    return wire.written


REQUESTS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: a\r\n\r\n",
    b"POST /a%20b?c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nhello",
    b"POST /t HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n",
    b"PUT / HTTP/1.0\r\nContent-Length: 0\r\n\r\n",
]
STATUS = re.compile(rb"HTTP/1\.1 (\d+) ")


@given(st.lists(st.sampled_from(REQUESTS), min_size=1, max_size=3), EDITS, CUTS)
@example([REQUESTS[2]], [(48, 5, b"")], [])
def test_heads_are_read_or_refused(requests: list[bytes], edits: list[Edit], cuts: list[int]) -> None:
    """Red if what a connection answers depends on its packets, if a good request is lost, or if a bad one is anything but a 4xx.
    501 is for an unknown transfer coding (RFC 9112, 6.1)."""
    whole = b"".join(requests)
    statuses = STATUS.findall(asyncio.run(converse(cut(whole, cuts))))
    num_answered = next((i + 1 for i, request in enumerate(requests) if b"HTTP/1.0" in request), len(requests))
    assert statuses == [b"200"] * num_answered
    for status in STATUS.findall(asyncio.run(converse(cut(mutated(whole, edits), cuts)))):
        assert status in (b"200", b"100", b"501") or status.startswith(b"4")


@given(st.sampled_from(sorted(PLAIN)), EDITS)
def test_headers_of_jpegs_are_read_or_not(name: str, edits: list[Edit]) -> None:
    """Red if a damaged header makes the reader fail, or if it tells another size than the decoder that will be given the bytes."""
    data = memoryview(mutated(PLAIN[name], edits))
    if not is_jpeg(data):
        return
    has_end(data), has_too_many_scans(data)
    plain = parse_plain_jpeg(data)
    if plain is None:
        return
    assert plain.height > 0 and plain.width > 0
    try:
        assert read_header(data)[:2] == (plain.height, plain.width)
    except RequestError as error:
        assert error.info.status == 422
    assert Image.MAX_IMAGE_PIXELS is None
