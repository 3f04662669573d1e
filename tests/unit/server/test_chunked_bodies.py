"""Chunked request bodies: cost per byte, framing, trailers."""

import asyncio
import itertools
from typing import Any, cast

import httptools
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send
from uvicorn.server import ServerState

from engine.config import EngineConfig
from server.http.chunked import MAX_LINE_BYTES, BadChunk, ChunkedDecoder, LineTooLong
from server.http.connection import ConnectionLimiter, LimitedProtocol
from tests.eventually import eventually_async

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
READ_BYTES = 250_000  # of the event loop at once


class CountingBytes(bytes):
    """Bytes that count how many of them are searched or copied, in all pieces cut from them."""

    touched = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        if isinstance(key, slice):
            CountingBytes.touched += len(found)
            return CountingBytes(found)
        return found

    def __radd__(self, other: bytes | bytearray) -> Any:
        if isinstance(other, bytearray):  # appended in place
            CountingBytes.touched += len(self)
            other.extend(bytes(self))
            return other
        CountingBytes.touched += len(other) + len(self)
        return CountingBytes(bytes(other) + bytes(self))

    def find(self, sub: Any, start: Any = 0, end: Any = None) -> int:
        found = super().find(sub, start, end)
        CountingBytes.touched += (min(end or len(self), len(self)) if found < 0 else found + 1) - start
        return found


class FakeTransport(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.is_closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else default

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True

    def can_write_eof(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Application:
    """An ASGI application that refuses every request at once, or reads its body first; it keeps the headers and bodies it was given."""

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


def connect(application: Application) -> tuple[LimitedProtocol, FakeTransport]:
    """A connection without a socket. Call it inside a running event loop."""
    config = uvicorn.Config(application, log_config=None, access_log=False)  # type: ignore[arg-type]
    config.load()
    limiter = ConnectionLimiter(EngineConfig(model="x"))
    protocol = LimitedProtocol(limiter, config=config, server_state=ServerState(), app_state={}, _loop=asyncio.get_running_loop())
    transport = FakeTransport()
    protocol.connection_made(transport)
    return protocol, transport


def chunked(payload: bytes, size: int) -> bytes:
    pieces = [payload[i : i + size] for i in range(0, len(payload), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


HOSTILE = {
    "blank lines in one chunk": chunked(b"\n" * (1 << 18), 1 << 18),
    "blank lines in small chunks": chunked(b"\r\n\r\n" * (1 << 12), 4),
    "chunks of one byte": chunked(b"\n" * (1 << 14), 1),
    "extensions": b"1;%b\r\n\n\r\n" % (b"x" * 4000) * 40 + b"0\r\n\r\n",
    "trailers": b"0\r\n" + b"a: b\r\n" * 20_000 + b"\r\n",
    "plain": chunked(b"x" * (1 << 18), 1 << 16),
}


@pytest.mark.parametrize("is_refused", [True, False])
def test_each_byte_of_a_chunked_body_is_touched_a_constant_number_of_times(is_refused: bool) -> None:
    """A body of blank lines was searched and copied once per line."""

    async def count(body: bytes, read_bytes: int) -> int:
        application = Application(reads_body=not is_refused)
        protocol, transport = connect(application)
        protocol.data_received(HEAD)
        if is_refused:
            await eventually_async(lambda: b" 401 " in transport.written, "the refusal")
        CountingBytes.touched = 0
        for start in range(0, len(body), read_bytes):
            protocol.data_received(CountingBytes(body[start : start + read_bytes]))
        touched = CountingBytes.touched
        await eventually_async(lambda: b" 401 " in transport.written, "the answer")
        protocol.connection_lost(None)
        return touched

    for name, body in HOSTILE.items():
        for read_bytes in (READ_BYTES, 1000):
            touched = asyncio.run(count(body, read_bytes))
            assert touched <= 3 * len(body), f"{name}, reads of {read_bytes}: {touched} bytes touched of {len(body)}"


def test_a_trailer_does_not_become_a_header() -> None:
    """An `Authorization` trailer authenticated a request."""

    async def exchange() -> Application:
        application = Application(reads_body=True)
        protocol, transport = connect(application)
        protocol.data_received(HEAD + b"2\r\nhi\r\n0\r\nAuthorization: Bearer secret\r\n\r\n" + HEAD + b"0\r\n\r\n")
        await eventually_async(lambda: transport.written.count(b" 401 ") == 2, "two answers")
        protocol.connection_lost(None)
        return application

    application = asyncio.run(exchange())
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


@pytest.mark.parametrize(
    "body",
    [b"x\r\n", b"\r\n", b"-1\r\n", b"+1\r\n", b"1\n", b"0x1\r\n", b"1 1\r\n", b"1 ;a\r\n", b"1\r\nab\r\n", b"1\r\na\n\n", b"0\r\n\n",
     b"0\r\na\n", b"1" * 16 + b"\r\n", b"1\r\r\n"],
)  # fmt: skip
def test_malformed_framing_is_rejected(body: bytes) -> None:
    with pytest.raises(BadChunk):
        ChunkedDecoder().feed(body)


def test_a_line_without_end_is_rejected() -> None:
    for line in (b"1;" + b"x" * MAX_LINE_BYTES, b"0\r\n" + b"x" * MAX_LINE_BYTES):
        decoder = ChunkedDecoder()
        with pytest.raises(LineTooLong):
            for byte in line:
                decoder.feed(cast(bytes, bytes([byte])))


async def refused_status(body: bytes) -> bytes:
    protocol, transport = connect(Application(reads_body=True))
    protocol.data_received(HEAD + body)
    protocol.connection_lost(None)
    return transport.written.split(b" ", 2)[1]


def test_the_status_of_a_refused_body() -> None:
    assert asyncio.run(refused_status(b"x\r\n")) == b"400"
    assert asyncio.run(refused_status(b"1;" + b"x" * MAX_LINE_BYTES)) == b"431"


def test_one_failed_check_does_not_end_the_limiter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits on idle and unread connections ended with the first exception."""

    async def check() -> None:
        loop = asyncio.get_running_loop()
        calls: list[Any] = []
        monkeypatch.setattr(loop, "call_later", lambda delay, call, *arguments: calls.append((call, arguments)))
        protocol, _ = connect(Application(reads_body=True))
        monkeypatch.setattr(protocol, "look", lambda now: 1 / 0)
        looks = [(call, arguments) for call, arguments in calls if call.__name__ == "_look"]
        with pytest.raises(ZeroDivisionError):
            looks[0][0](*looks[0][1])
        assert sum(call.__name__ == "_look" for call, _ in calls) == 2

    asyncio.run(check())
