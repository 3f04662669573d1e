"""Limits of a connection before its client is known, and clients that leave."""

import asyncio
import json
import logging

import pytest
from starlette.types import Receive, Scope, Send

from engine.config import EngineConfig
from server.http.connection import LINGER_S, MAX_HEAD_BYTES, MIN_WAIT_S
from server.http.log import SPARING_S, Sparing
from tests.unit.server.in_process import HttpServer, echo, settle, virtual
from tests.unit.server.raw_http import CHUNKED, GET_HEALTH, chunked, head_of, request_of, text_body

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
    """Fails if waiting clients hide the health from a load balancer, or if one connection too many is let in."""
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
async def test_requests_may_be_cut_anywhere() -> None:
    """Fails if a head that is split over packets is another one (the parser drops the body of an upgrade), or if a request that shares a
    packet with the end of a chunked body is lost."""
    upgrade = head_of(len(SMALL))[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n\r\n" + SMALL
    data = chunked(SMALL, len(SMALL)) + upgrade + request_of(SMALL) + GET_HEALTH
    post = (200, b"POST /v1/chat/completions %d" % len(SMALL))
    expected = [post, post, post, (200, b"GET /health 0")]
    server = HttpServer(echo)
    for cut in range(1, len(data)):
        wire = await server.ask(data[:cut], data[cut:])
        assert wire.answers == expected, cut
        wire.leave()
    assert (await server.ask(*[bytes([byte]) for byte in data])).answers == expected


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


def test_the_same_complaint_is_logged_once() -> None:
    sparing = Sparing()

    def log(seconds: float) -> str | None:
        record = logging.LogRecord("uvicorn.error", logging.WARNING, "", 0, "Invalid HTTP request received.", (), None)
        record.created = seconds
        return record.msg if sparing.filter(record) else None

    shown = [log(1000.0 + number / 10) for number in range(50)]
    assert shown[0] is not None and shown[1:] == [None] * 49
    assert log(1000.0 + SPARING_S) == f"{shown[0]} (49 more since the last one)"


@virtual
async def test_rubbish_gets_an_error(caplog: pytest.LogCaptureFixture) -> None:
    server = HttpServer(echo)
    for _ in range(3):
        ((status, error),) = (await server.ask(b"\x16\x03\x01 rubbish\r\n\r\n")).answers
        assert status == 400 and json.loads(error)["error"]["type"] == "invalid_request_error"
    assert sum("Invalid HTTP" in message for message in caplog.messages) <= 1
