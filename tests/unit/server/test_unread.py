"""Clients that ask and do not read: what they hold, for how long, and what others get meanwhile."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from engine.config import EngineConfig
from engine.messages import Event, Submit
from server.http import client as client_module
from server.http.client import Client
from server.http.listen import SEND_BYTES
from server.http.reply import WRITE_S
from tests.eventually import eventually
from tests.unit.server.in_process import HIGH_WATER, HttpServer, echo, say, serving, settle, virtual
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
async def test_a_small_answer_that_is_not_read_does_not_keep_a_closed_connection() -> None:
    """Fails if the close of an idle connection, or of a client that sends no more, waits for ever until the client reads."""
    server = HttpServer(echo, EngineConfig(write_timeout=30, idle_timeout=75))
    for seconds in (75, 0):
        wire = server.connect()
        wire.reads = False
        wire.send(GET_HEALTH)
        await settle()
        if not seconds:
            wire.end()
        await asyncio.sleep(seconds + 29)
        assert 0 < wire.get_write_buffer_size() < HIGH_WATER and wire.is_closed and not wire.is_aborted
        await asyncio.sleep(2)
        assert wire.is_aborted and not server.limiter._open


@virtual
async def test_unread_connections_make_room() -> None:
    server = HttpServer(answer_at_length, EngineConfig(max_connections=4, write_timeout=1000))
    wires = [server.connect() for _ in range(4)]
    for wire in wires:
        wire.reads = False
        wire.send(GET_HEALTH)
    for _ in range(5):
        await asyncio.sleep(1)
        for wire in wires[:2]:
            wire.read(HIGH_WATER)
    for number in range(3):
        wire = await server.ask(b"GET /v1/models HTTP/1.1\r\n\r\n")
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


def test_unread_events_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_UNREAD_EVENTS", 100)
    client = Client(cast(Any, SimpleNamespace(send=lambda _: None)), cast(Any, None), 10)
    client.check_open = lambda: None  # type: ignore[method-assign]
    streams = [client.submit([cast(Submit, SimpleNamespace(rid=rid, n=1, body=None))]) for rid in range(4)]
    for stream, count in zip(streams, (40, 20, 30, 45), strict=True):
        for _ in range(count):
            stream.push(Event(streams.index(stream), num_tokens=1))
    client._drop_unread()
    assert [stream.num_unread for stream in streams] == [40, 20, 30, 0]
