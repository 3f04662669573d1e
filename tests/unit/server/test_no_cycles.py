"""What a connection leaves behind: nothing that only the garbage collector finds, which comes once in thousands of them."""

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle
from uvicorn.server import ServerState

from engine.config import EngineConfig
from server.http.connection import ConnectionLimiter
from server.http.direct import DirectProtocol, DirectReader, direct_reader

LARGE = 1_000_000


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    """What the collector has found, when it is asked."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body as far as the parser has it, and what is left directly, unless it is refused: then half of that."""
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


@asynccontextmanager
async def listening() -> AsyncIterator[int]:
    config = Config(application, ws="none", lifespan="off", log_config=None, access_log=False)
    config.load()
    of_uvicorn: dict[str, Any] = {"config": config, "server_state": ServerState(), "app_state": {}}
    limiter = ConnectionLimiter(EngineConfig())
    server = await asyncio.get_running_loop().create_server(lambda: DirectProtocol(limiter, **of_uvicorn), "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def talk(port: int, path: str, num_bytes: int, num_sent: int) -> None:
    """A connection with two requests of so many bytes, of whose bodies so many are sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2 if num_sent == num_bytes else 1):
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {num_bytes}\r\n\r\n".encode() + b"x" * num_sent)
        if num_sent == num_bytes:
            assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
        else:
            await asyncio.sleep(0.1)
    writer.close()
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("path", "num_bytes", "num_sent"),
    [("/", 0, 0), ("/", 10, 10), ("/", LARGE, LARGE), ("/refuse", LARGE, LARGE), ("/", LARGE, LARGE // 2)],
    ids=["no body", "a small one", "a large one", "a refused one", "one that breaks off"],
)
async def test_a_connection_leaves_no_cycle(garbage: list[object], path: str, num_bytes: int, num_sent: int) -> None:
    """Red if a connection, its requests or what their bodies were read into wait for the collector: megabytes did."""
    async with listening() as port:
        await talk(port, path, num_bytes, num_sent)
        gc.collect()
        left = [thing for thing in garbage if isinstance(thing, DirectProtocol | DirectReader | RequestResponseCycle | bytearray)]
        assert not left
