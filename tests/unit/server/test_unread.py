"""Clients that ask and do not read: what they hold, for how long, and what others get meanwhile."""

import asyncio
import contextlib
import functools
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from engine.config import EngineConfig
from engine.messages import Event, Submit
from server.http import client as client_module
from server.http import connection as connection_module
from server.http.client import Client
from server.http.connection import ConnectionLimiter, LimitedProtocol
from server.http.direct import DirectProtocol
from server.http.listen import SEND_BYTES, make_server
from server.http.reply import WRITE_S
from tests.eventually import eventually, eventually_async
from tests.unit.server.in_process import HIGH_WATER, MIB, HttpServer, say, serving, settle, virtual
from tests.unit.server.raw_http import GET_HEALTH, connect, request_of, text_body
from tests.unit.server.stack import Stack, answer_ids

PIECE_BYTES, NUM_PIECES = 10_000, 100
LONG = say(*["token "] * 3000)
STREAM = request_of(text_body(stream=True))


async def answer_at_length(scope: Scope, receive: Receive, send: Send) -> None:
    """Application whose answers no buffer holds."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % (PIECE_BYTES * NUM_PIECES))]})
    for number in range(NUM_PIECES):
        await send({"type": "http.response.body", "body": b"x" * PIECE_BYTES, "more_body": number < NUM_PIECES - 1})


@virtual
async def test_a_client_that_does_not_read_is_closed() -> None:
    """Fails if a client that reads nothing keeps its connection, if its answers fill the memory, or if a client that reads slowly, but all
    the time, is taken for one."""
    server = HttpServer(answer_at_length, EngineConfig(write_timeout=30, idle_timeout=1000))
    unread, slow = server.connect(), server.connect()
    for wire in (unread, slow):
        wire.reads = False
        wire.send(GET_HEALTH * 3)
    for second in range(0, 600, 20):
        assert unread.is_aborted == (second >= 40)
        assert max(wire.get_write_buffer_size() for wire in (unread, slow)) < HIGH_WATER + 2 * PIECE_BYTES
        slow.read(500)
        await asyncio.sleep(20)
    slow.reads = True
    while slow.get_write_buffer_size():
        slow.read(HIGH_WATER)
        await settle()
    assert slow.answers == [(200, b"x" * PIECE_BYTES * NUM_PIECES)] * 3


@virtual
async def test_unread_connections_make_room() -> None:
    """Fails if clients that read nothing keep others out, or if those that read have to make room."""
    server = HttpServer(answer_at_length, EngineConfig(max_connections=4, write_timeout=1000))
    wires = [server.connect(f"10.0.0.{number}") for number in range(4)]
    for wire in wires:
        wire.reads = False
        wire.send(GET_HEALTH)
    for _ in range(5):
        await asyncio.sleep(1)
        for wire in wires[:2]:
            wire.read(100)
    for number in range(3):
        wire = await server.ask(b"GET /v1/models HTTP/1.1\r\n\r\n", address=f"10.0.1.{number}")
        assert wire.statuses == ([200], [200], [503])[number]
        wire.send(b"POST / HTTP/1.1\r\nContent-Length: 1\r\n\r\n")  # keeps its place
        await settle()
    assert [wire.is_aborted for wire in wires] == [False, False, True, True]


@virtual
async def test_places_are_free_when_generation_ends(model_folder: Path) -> None:
    """Fails if an answer that is not read counts as a running request."""
    with serving(model_folder, max_queued_requests=2) as api:
        api.script = LONG
        wires = [api.connect() for _ in range(3)]
        for wire in wires:
            wire.reads = False
            wire.send(STREAM)
            await settle()
        assert len(api.submits) == 3 and api.client.num_streams == 0 and len(api.client.replies) == 3
        assert all(wire.get_write_buffer_size() > HIGH_WATER for wire in wires)
        for wire in wires:
            wire.leave()
        await settle()
        assert not api.client.replies


@virtual
async def test_a_deadline_covers_the_writing(model_folder: Path) -> None:
    """Fails if a client that reads a byte now and then keeps its answer for longer than it may take."""
    with serving(model_folder, request_timeout=20, write_timeout=300) as api:
        api.script = LONG
        wire = api.connect()
        wire.reads = False
        wire.send(STREAM)
        await settle()
        for _ in range(20 + WRITE_S - 1):
            assert not wire.is_closed
            wire.read(1)
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        assert wire.is_aborted


def test_streams_of_a_process_that_are_not_read(stack: Stack) -> None:
    """Fails if an unread answer holds a place in the engine, or more of the kernel's memory than it may."""
    stack.scheduler.script = answer_ids([65 + i % 26 for i in range(6000)], step=10)
    count = len(stack.scheduler.requests)
    with contextlib.ExitStack() as undo:
        for _ in range(4):
            undo.enter_context(connect(stack, receive_bytes=2048)).sendall(STREAM)
        eventually(lambda: len(stack.scheduler.requests) == count + 4, "every request")
        eventually(lambda: stack.http.get("/load").json() == {"server_load": 0}, "no request in the engine")
        port = int(stack.url.rsplit(":", 1)[1])
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        unsent = [int(row[4].split(":")[0], 16) for row in rows if int(row[1].split(":")[1], 16) == port and row[3] != "0A"]
        assert len(unsent) >= 4 and max(unsent) <= 2 * SEND_BYTES  # as the kernel counts them


async def test_the_kernel_tells_what_a_client_reads() -> None:
    """Fails if the number of acknowledged bytes is read from the wrong place of TCP_INFO."""
    config, made = EngineConfig(write_timeout=30), list[DirectProtocol]()
    limiter = ConnectionLimiter(config)
    server = make_server(answer_at_length, limiter, config, grace=1)
    server.config.load()
    of_uvicorn: dict[str, Any] = {"config": server.config, "server_state": server.server_state, "app_state": {}}

    def make() -> DirectProtocol:
        made.append(DirectProtocol(limiter, **of_uvicorn))
        return made[-1]

    loop = asyncio.get_running_loop()
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 14)
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    async with await loop.create_server(make, sock=listener):
        client.connect(listener.getsockname())
        client.setblocking(False)
        await loop.sock_sendall(client, GET_HEALTH)
        await eventually_async(lambda: made and made[0].look(100.0) and made[0] in limiter.waiting, "an unread answer")
        assert not made[0].transport.is_closing()
        await loop.sock_recv(client, 1 << 16)
        await eventually_async(lambda: made[0].look(120.0) and made[0] not in limiter.waiting, "progress of the client")
        await eventually_async(lambda: made[0].look(120.0) and made[0] in limiter.waiting, "an unread answer")
        assert made[0].look(149.0) and not made[0].transport.is_closing()
        made[0].look(151.0)
        assert made[0].transport.is_closing()
        client.close()


class Slow:
    """A connection with so many unsent bytes, for a limiter."""

    def __init__(self, address: str, size: int):
        self.address, self.size, self.is_gone = address, size, False
        self.transport = SimpleNamespace(abort=functools.partial(setattr, self, "is_gone", True))

    def look(self, now: float) -> int:
        return self.size


def test_unsent_bytes_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if large answers to many clients fill the memory, or if others than those of the greediest address pay for it."""
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", 10 * MIB)
    limiter = ConnectionLimiter(EngineConfig())
    greedy, modest = [Slow("a", 3 * MIB) for _ in range(4)], Slow("b", 4 * MIB)
    limiter._open |= cast("set[LimitedProtocol]", {*greedy, modest})
    limiter._look(cast(Any, SimpleNamespace(time=lambda: 0.0, call_later=lambda *_: None)))
    assert sum(one.is_gone for one in greedy) == 2 and not modest.is_gone


def test_unread_events_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if what the engine makes for clients that do not read fills the memory."""
    monkeypatch.setattr(client_module, "MAX_UNREAD_EVENTS", 100)
    client = Client(cast(Any, SimpleNamespace(send=lambda _: None)), cast(Any, None), 10)
    client.check_open = lambda: None  # type: ignore[method-assign]
    streams = [client.submit([cast(Submit, SimpleNamespace(rid=rid, n=1, body=None))]) for rid in range(4)]
    for stream, address, count in zip(streams, "aaab", (40, 20, 30, 45), strict=True):
        stream.address = address
        for _ in range(count):
            stream.push(Event(streams.index(stream), num_tokens=1))
    client._drop_unread()
    assert [stream.num_unread for stream in streams] == [0, 20, 30, 45]
