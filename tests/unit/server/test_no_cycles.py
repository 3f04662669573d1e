"""A connection leaves nothing that only the garbage collector finds, which runs once in thousands of connections."""

import gc
from collections.abc import Iterator

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.http.direct import DirectProtocol, DirectReader, direct_reader
from tests.unit.server.in_process import HttpServer, settle, virtual
from tests.unit.server.raw_http import packets

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
    """Fails if a connection, its requests or the buffers of their bodies wait for the collector: megabytes did."""
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
