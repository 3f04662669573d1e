"""All ports have the same limits; chunked bodies; what a connection costs, and what it leaves."""

import gc
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.errors import RequestError
from server.http.chunked import ChunkedDecoder
from server.http.direct import DirectProtocol, DirectReader, direct_reader
from tests.unit.server.in_process import HttpServer, run_virtually, serving, settle, virtual
from tests.unit.server.raw_http import Counted, packets, request_of, text_body
from tests.unit.server.stack import ROOT

LISTENING = re.compile(r"\.(listen|create_server|start_server|serve_forever|AppRunner|TCPSite|Config|run_app)\(")
PLACES = {
    "server/http/listen.py: Config": "the limited server",
    "server/http/app.py: listen": "the api's port and that of metrics, by listen.py",
    "server/route.py: listen": "the proxy's, by listen.py",
    "server/route.py: create_server": "its socket",
    "engine/launch/fleet.py: create_server": "asks for free ports",
}


def test_all_listeners_are_known() -> None:
    files = [file for folder in ("engine", "server", "models") for file in (ROOT / folder).rglob("*.py")]
    found = {f"{file.relative_to(ROOT)}: {name}" for file in files for name in LISTENING.findall(file.read_text())}
    assert found == PLACES.keys()


@virtual
async def test_http_1_0_has_no_chunks(model_folder: Path) -> None:
    with serving(model_folder) as api:
        for stream in (False, True):
            wire = await api.ask(request_of(text_body(stream=stream)).replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, text = wire.received.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head.lower() and wire.is_closed
            assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n") if stream else json.loads(text)["choices"]


LARGE = 1_000_000


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """Objects that the collector has found, once it is asked."""
    gc.collect()
    gc.freeze()  # what other tests left takes long to look at
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
    gc.enable()


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Read what the parser has of the body, and the rest directly; only half of the rest for /refuse."""
    reader = direct_reader(scope)
    assert reader is not None
    rest = int(dict(scope["headers"]).get(b"content-length", 0)) - len((await receive())["body"])
    if rest and reader.is_ready:
        with reader.take_over(rest):
            try:
                await reader.fill(memoryview(bytearray(rest // 2 if scope["path"] == "/refuse" else rest)), lambda _: 5.0)
            except ClientDisconnect:
                return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@virtual
async def test_a_connection_leaves_no_cycle(garbage: list[object]) -> None:
    server = HttpServer(application)
    for path, num_bytes, num_sent in (
        ("/", 0, 0), ("/", 10, 10), ("/", LARGE, LARGE), ("/refuse", LARGE, LARGE), ("/", LARGE, LARGE // 2),
    ):  # fmt: skip
        wire, is_whole = server.connect(), num_sent == num_bytes
        for _ in range(1 + is_whole):
            wire.send(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n".encode(), *packets(b"x" * num_sent))
            await settle()
        assert wire.answers == [(200, b"ok")] * 2 * is_whole
        wire.leave()
        del wire
        await settle()
        gc.collect()
        left = [thing for thing in garbage if isinstance(thing, DirectProtocol | DirectReader | RequestResponseCycle | bytearray)]
        assert not left, (path, num_bytes, num_sent)


HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
READ_BYTES = 250_000  # of the event loop at once


class Application:
    """ASGI application that refuses every request at once, or reads its body first."""

    def __init__(self, reads_body: bool) -> None:
        self.reads_body = reads_body
        self.bodies: list[bytes] = []
        self.headers: list[dict[bytes, bytes]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", self.reads_body
        while more:
            message: Message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        self.bodies.append(body)
        self.headers.append(dict(scope["headers"]))
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


def chunked(payload: bytes, size: int) -> bytes:
    pieces = [payload[i : i + size] for i in range(0, len(payload), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


HOSTILE = {
    "blank lines in one chunk": chunked(b"\n" * (1 << 18), 1 << 18),
    "blank lines in small chunks": chunked(b"\r\n\r\n" * (1 << 12), 4),
    "chunks of one byte": chunked(b"\n" * (1 << 14), 1),
    "extensions": b"1;%b\r\n\n\r\n" % (b"x" * 4000) * 40 + b"0\r\n\r\n",
    "trailers": b"0\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    "plain": chunked(b"x" * (1 << 18), 1 << 16),
}


def test_each_byte_of_a_chunked_body_is_touched_a_constant_number_of_times() -> None:

    async def count(body: bytes, read_bytes: int, is_refused: bool) -> int:
        wire = await HttpServer(Application(reads_body=not is_refused)).ask(HEAD)
        assert wire.statuses == [401] * is_refused
        Counted.num_touched = 0
        wire.send(*(Counted(body[start : start + read_bytes]) for start in range(0, len(body), read_bytes)))
        await settle()
        assert wire.statuses == [401]
        return Counted.num_touched

    for name, body in HOSTILE.items():
        for read_bytes, is_refused in itertools.product((READ_BYTES, 1000), (True, False)):
            touched = run_virtually(count(body, read_bytes, is_refused))
            assert touched <= 3 * len(body), f"{name}, reads of {read_bytes}: {touched} bytes touched of {len(body)}"


@virtual
async def test_a_trailer_does_not_become_a_header() -> None:
    """An `Authorization` trailer authenticated a request."""
    application = Application(reads_body=True)
    wire = await HttpServer(application).ask(HEAD + b"2\r\nhi\r\n0\r\nAuthorization: Bearer secret\r\n\r\n" + HEAD + b"0\r\n\r\n")
    assert wire.statuses == [401, 401]
    assert application.bodies == [b"hi", b""]
    assert all(b"authorization" not in headers for headers in application.headers)


def decode(data: bytes, cuts: list[int]) -> tuple[bytes, int]:
    """Payload of a body, and where it ends."""
    decoder, payload, end = ChunkedDecoder(), b"", 0
    borders = [0, *sorted(cuts), len(data)]
    for start, stop in itertools.pairwise(borders):
        if not decoder.is_complete:
            piece, size = decoder.feed(data[start:stop])
            payload, end = payload + piece, start + size
    assert decoder.is_complete
    return payload, end


@given(
    st.lists(st.tuples(st.binary(min_size=1, max_size=40), st.sampled_from([b"", b";a", b";a=b", b';a="b"'])), max_size=8),
    st.lists(st.sampled_from([b"a: b\r\n", b"X-Checksum: 1\r\n"]), max_size=3),
    st.sampled_from([b"", b"GET / HTTP/1.1\r\n\r\n", b"\r\n\r\n", b"0\r\n\r\n"]),
    st.data(),
)
def test_chunks_are_decoded_as_httptools_does(chunks: list[tuple[bytes, bytes]], trailers: list[bytes], rest: bytes, data: Any) -> None:
    body = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece, extension in chunks)
    body += b"0\r\n" + b"".join(trailers) + b"\r\n"
    cuts = data.draw(st.lists(st.integers(0, len(body)), max_size=10))

    class Reference:
        payload, is_complete = b"", False

        def on_body(self, piece: bytes) -> None:
            self.payload += piece

        def on_message_complete(self) -> None:
            self.is_complete = True

    reference = Reference()
    httptools.HttpRequestParser(reference).feed_data(HEAD + body)
    assert reference.is_complete
    assert decode(body + rest, cuts) == (reference.payload, len(body))


def test_malformed_framing_is_rejected() -> None:
    lines = b"x\r\n", b"\r\n", b"-1\r\n", b"+1\r\n", b"1\n", b"0x1\r\n", b"1 1\r\n", b"1 ;a\r\n", b"1" * 16 + b"\r\n", b"1\r\r\n"
    for body in (*lines, b"1\r\nab\r\n", b"1\r\na\n\n", b"0\r\n\n", b"0\r\na\n"):
        with pytest.raises(RequestError, match="malformed"):
            ChunkedDecoder().feed(body)
