"""Limits of a connection before its client is known; clients that leave, or ask and do not read."""

import asyncio
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Receive, Scope, Send

from engine.launch.config import EngineConfig
from engine.wire.messages import Event, Submit
from server.http import client as client_module
from server.http.client import Client
from server.http.connection import LINGER_S, MAX_HEAD_BYTES, MIN_WAIT_S
from server.http.listen import SEND_BYTES
from server.http.reply import WRITE_S
from tests.eventually import eventually
from tests.unit.server.in_process import HIGH_WATER, HttpServer, echo, say, serving, settle, virtual
from tests.unit.server.raw_http import CHUNKED, GET_HEALTH, connect, request_of, text_body
from tests.unit.server.stack import Stack, answer_ids

SMALL = text_body()
ENDLESS = {
    "one header": (b"GET /v1/models HTTP/1.1\r\nX: ", b"x" * 65536, 431),
    "many headers": (b"GET /v1/models HTTP/1.1\r\n", b"a: b\r\n" * 10_000, 431),
    "a URL": (b"GET /", b"x" * 65536, 414),
    "trailers": (b"POST /v1/chat/completions" + CHUNKED + b"0\r\nX: ", b"x" * 65536, 431),
    "an extension of a chunk": (b"POST /tokenize" + CHUNKED + b"1;", b"x" * 65536, 431),
}


async def wait_if_posted(scope: Scope, receive: Receive, send: Send) -> None:
    """Application that answers GET and keeps POST waiting until the client leaves."""
    while scope["method"] == "POST" and (await receive())["type"] != "http.disconnect":
        pass
    if scope["method"] == "GET":
        await echo(scope, receive, send)


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Application that answers without reading the body."""
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


@virtual
async def test_an_endless_head_is_refused_early() -> None:
    for name, (head, piece, status) in ENDLESS.items():
        wire, num_sent = await HttpServer(echo).ask(head), 0
        while not wire.received:
            wire.send(piece)
            await settle()
            num_sent += len(piece)
            assert num_sent <= 3 * MAX_HEAD_BYTES, name
        ((answered, error),) = wire.answers
        assert (answered, b"too l" in error, wire.is_closed) == (status, True, False), name
        wire.send(*[piece] * 10)
        await asyncio.sleep(LINGER_S + 0.1)
        assert wire.is_closed and len(wire.answers) == 1, name


@virtual
async def test_an_unfinished_head_times_out() -> None:
    for sent in (b"", b"GET /v1/mod", b"GET /health HTTP/1.1\r\nX-Slow: "):
        wire = await HttpServer(echo, EngineConfig(header_timeout=20, idle_timeout=75)).ask(sent)
        for _ in range(19):
            await asyncio.sleep(1)
            wire.send(b"x" * bool(sent))
        assert not wire.is_closed and not wire.received
        await asyncio.sleep(1.1)
        assert wire.statuses == [408] * bool(sent)
        await asyncio.sleep(LINGER_S)
        assert wire.is_closed


@virtual
async def test_an_idle_connection_is_closed_and_one_in_use_is_not() -> None:
    wire = HttpServer(echo, EngineConfig(header_timeout=20, idle_timeout=75)).connect()
    for count in range(1, 4):
        wire.send(GET_HEALTH)
        await asyncio.sleep(74)
        assert wire.statuses == [200] * count and not wire.is_closed
    await asyncio.sleep(2)
    assert wire.is_closed


@virtual
async def test_idle_connections_make_room() -> None:
    server = HttpServer(echo, EngineConfig(max_connections=4))
    idle = [server.connect() for _ in range(30)]
    assert (await server.ask(request_of(SMALL))).statuses == [503]  # their requests may be under way
    await asyncio.sleep(MIN_WAIT_S + 0.1)
    assert (await server.ask(request_of(SMALL))).statuses == [200]
    assert [wire.is_aborted for wire in idle] == [True] + [False] * 29


@virtual
async def test_health_is_answered_when_all_connections_are_busy() -> None:
    server = HttpServer(wait_if_posted, EngineConfig(max_connections=4))
    busy = [await server.ask(request_of(SMALL)) for _ in range(4)]
    for request, status in ((GET_HEALTH, 200), (request_of(SMALL), 503), (GET_HEALTH, 200)):
        wire = await server.ask(request)
        assert wire.statuses == [status]
        wire.leave()
    assert not any(wire.received for wire in busy)
    busy[0].leave()
    await settle()
    assert not (await server.ask(request_of(SMALL))).received  # accepted in its place


@virtual
async def test_little_is_read_behind_a_running_request() -> None:
    wire = await HttpServer(wait_if_posted).ask(request_of(SMALL), b"POST / HTTP/1.1\r\nX: ", *[b"x" * 65536] * 10)
    assert not wire.received and len(wire._input) >= 8


@virtual
async def test_a_refused_body_must_end() -> None:
    wire = await HttpServer(refuse, EngineConfig(header_timeout=20)).ask(b"POST /nowhere" + CHUNKED)
    assert wire.statuses == [404]
    for _ in range(22):
        assert not wire.is_closed
        wire.send(b"1\r\nx\r\n" * 10)
        await asyncio.sleep(1)
        if wire.is_closed:
            break
    assert wire.is_closed


@virtual
async def test_large_heads_that_end_are_read() -> None:
    wire = await HttpServer(echo).ask(*[b"GET /health HTTP/1.1\r\nCookie: " + b"x" * 60_000 + b"\r\n\r\n"] * 2)
    assert wire.statuses == [200, 200]


@virtual
async def test_rubbish_gets_an_error(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(echo)
    for _ in range(3):
        ((status, error),) = (await server.ask(b"\x16\x03\x01 rubbish\r\n\r\n")).answers
        assert status == 400 and json.loads(error)["error"]["type"] == "invalid_request_error"
    assert sum("Invalid HTTP" in message for message in caplog.messages) <= 1


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
async def test_a_deadline_covers_the_writing(model_folder: Path) -> None:
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
    stack.script = answer_ids([65 + i % 26 for i in range(6000)], step=10)
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
    client.check_open = lambda: None
    streams = [client.submit([cast(Submit, SimpleNamespace(rid=rid, n=1, body=None))]) for rid in range(4)]
    for stream, count in zip(streams, (40, 20, 30, 45), strict=True):
        for _ in range(count):
            stream.push(Event(streams.index(stream), num_tokens=1))
    client._drop_unread()
    assert [stream.num_unread for stream in streams] == [40, 20, 30, 0]
