"""Connections of every listener: limits of heads, refused bodies, request smuggling, and clients that do not read."""

import asyncio
import contextlib
import gc
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from engine.wire.config import EngineConfig
from engine.wire.messages import Event, Submit
from engine.wire.params import OutputOptions, SamplingParams
from engine.wire.stats import Stages
from server.api.http import registry as registry_module
from server.api.http.connection import HEAD_SECONDS, LINGER_S, MAX_HEAD_BYTES, LimitedProtocol, connection_limit, make_server
from server.api.http.registry import RequestRegistry
from server.api.http.reply import WRITE_S
from tests.eventually import eventually_async
from tests.unit.server.in_process import HttpServer, Wire, echo, say, serving, settle, virtual
from tests.unit.server.raw_http import CHUNKED, GET_HEALTH, packets, request_of, text_body

SMALL = text_body()
POST = b"POST /v1/x HTTP/1.1\r\nHost: x\r\n"
CHUNKED_POST = b"POST /v1/x" + CHUNKED


async def wait_if_posted(scope: Scope, receive: Receive, send: Send) -> None:
    while scope["method"] == "POST" and (await receive())["type"] != "http.disconnect":
        pass
    if scope["method"] == "GET":
        await echo(scope, receive, send)


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    await send({"type": "http.response.start", "status": 404, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body"})


# Heads and chunks


@virtual
async def test_bytes_that_are_no_body_are_bounded() -> None:
    """Fails if blank lines before a request, a head, an extension of a chunk or trailers may go on without end."""
    for name, head, piece, status in (
        ("blank lines", b"", b"\r\n" * 32768, 431),
        ("one header", b"GET /v1/models HTTP/1.1\r\nX: ", b"x" * 65536, 431),
        ("many headers", b"GET /v1/models HTTP/1.1\r\n", b"a: b\r\n" * 10_000, 431),
        ("a URL", b"GET /", b"x" * 65536, 431),
        ("trailers", CHUNKED_POST + b"0\r\nX: ", b"x" * 65536, 431),
        ("an extension of a chunk", CHUNKED_POST + b"1;", b"x" * 65536, 431),
    ):
        wire, num_sent = await HttpServer(echo).ask(head), 0
        while not wire.received:
            wire.send(piece)
            await settle()
            num_sent += len(piece)
            assert num_sent <= 3 * MAX_HEAD_BYTES, name
        ((answered, error),) = wire.answers
        assert (answered, b"too large" in error, wire.is_closed) == (status, True, False), name
        await asyncio.sleep(LINGER_S + 0.1)
        assert wire.is_closed, name


@virtual
async def test_an_unfinished_head_times_out() -> None:
    for sent in (b"", b"GET /v1/mod", b"GET /health HTTP/1.1\r\nX-Slow: "):
        wire = await HttpServer(echo).ask(sent)
        for _ in range(int(HEAD_SECONDS) - 1):
            await asyncio.sleep(1)
            wire.send(b"x" * bool(sent))
        assert not wire.is_closed and not wire.received
        await asyncio.sleep(1.1)
        assert wire.is_closed and not wire.received


@virtual
async def test_an_idle_connection_is_closed_and_one_in_use_is_not() -> None:
    wire = HttpServer(echo, EngineConfig(idle_timeout=75)).connect()
    for count in range(1, 4):
        wire.send(GET_HEALTH)
        await asyncio.sleep(74)
        assert wire.statuses == [200] * count and not wire.is_closed
    await asyncio.sleep(2)
    assert wire.is_closed


@virtual
async def test_what_a_proxy_may_understand_differently_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """Each case could hide a second request from a proxy, or from this server."""
    hidden = b"0\r\n\r\nGET /hidden HTTP/1.1\r\n\r\n"
    server = HttpServer(echo)
    for lines in (
        b"Content-Length: 3\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked\r\nContent-Length: 3",
        b"Content-Length: 3\r\nContent-Length: 4", b"Content-Length: +3", b"Content-Length: 3, 3", b"Content-Length: 0x3",
        b"Transfer-Encoding: gzip, chunked", b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked, gzip",
        b"Transfer-Encoding: gzip", b"Transfer-Encoding: xchunked", b"Transfer-Encoding : chunked", b"Transfer-Encoding:\r\n chunked",
        b"Host: b", b"X: a\rTransfer-Encoding: chunked", b"X: a\nTransfer-Encoding: chunked", b"X: a\0b", b"X: a\r\n b",
    ):  # fmt: skip
        wire = await server.ask(POST + lines + b"\r\n\r\n" + hidden)
        assert wire.statuses == [400], lines
    for chunks in (b"1\nx\r\n", b"1 \r\nx\r\n", b"1\r\nxy", b"0x1\r\nx\r\n", b"1;a\nx\r\n", b"f" * 17 + b"\r\nx"):
        assert (await server.ask(CHUNKED_POST + chunks + hidden)).statuses == [400], chunks
    for head in (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01 rubbish\r\n\r\n"):
        ((status, error),) = (await server.ask(head + hidden)).answers
        assert status == 400 and json.loads(error)["error"]["type"] == "invalid_request_error"
    assert not caplog.messages


@virtual
async def test_an_offer_to_upgrade_does_not_cost_the_body() -> None:
    """Java's client offers HTTP/2 with every request. A head that is split before the offer is refused: its body would become a request."""
    body = b"GET /hidden HTTP/1.1\r\n\r\n"
    head = POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert (await HttpServer(echo).ask(head + body)).answers == [(200, b"POST /v1/x %d" % len(body))]
    assert (await HttpServer(echo).ask(head[:10], head[10:] + body)).statuses in ([200], [400])
    split = head.index(b"Upgrade: h2c")
    assert (await HttpServer(echo).ask(head[:split], head[split:] + body)).statuses == [400]


@virtual
async def test_a_trailer_does_not_become_a_header() -> None:
    """An `Authorization` trailer authenticated a request."""
    seen: list[dict[bytes, bytes]] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        await echo(scope, receive, send)
        seen.append(dict(scope["headers"]))

    wire = await HttpServer(note).ask((CHUNKED_POST + b"2\r\nhi\r\n0\r\nAuthorization: Bearer secret\r\n\r\n") * 2)
    assert wire.answers == [(200, b"POST /v1/x 2")] * 2
    assert len(seen) == 2 and all(b"authorization" not in headers for headers in seen)


# Refused bodies, and several requests on a connection


@virtual
async def test_a_refused_body_is_not_read() -> None:
    """Its connection is closed when the client had time to read the answer. Reading it to its end stopped all streams."""
    for head, piece in ((POST + b"Content-Length: 1000000000\r\n\r\n", b"x" * 65536), (CHUNKED_POST, b"1\r\nx\r\n" * 10_000)):
        wire = await HttpServer(refuse).ask(head)
        assert wire.statuses == [404] and b"connection: close" in wire.received
        wire.send(*[piece] * 100)
        await settle()
        assert len(wire._input) >= 99 and not wire.is_closed
        await asyncio.sleep(LINGER_S + 0.1)
        assert wire.is_closed and wire.statuses == [404]


@virtual
async def test_a_malformed_body_ends_its_request_once() -> None:
    async def answer_at_disconnect(scope: Scope, receive: Receive, send: Send) -> None:
        await wait_if_posted(scope, receive, send)
        with contextlib.suppress(RuntimeError):
            await refuse(scope, receive, send)

    wire = await HttpServer(answer_at_disconnect).ask(CHUNKED_POST + b"1\r\nx\r\nrubbish")
    await asyncio.sleep(LINGER_S + 0.1)
    assert wire.statuses == [400] and wire.is_closed


@virtual
async def test_pipelined_requests_are_answered_in_order() -> None:
    goes_on = asyncio.Event()

    async def wait(scope: Scope, receive: Receive, send: Send) -> None:
        await goes_on.wait()
        await echo(scope, receive, send)

    few = await HttpServer(wait).ask(b"GET /3 HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    assert not few.received
    goes_on.set()
    await settle()
    assert few.answers == [(200, b"GET /3 0")] * 3 and not few.is_closed


@virtual
async def test_a_client_that_leaves_with_two_requests_ends_the_first(model_folder: Path) -> None:
    with serving(model_folder) as api:
        api.script = lambda *_: None
        wire = await api.ask(request_of(SMALL) + GET_HEALTH)
        assert len(api.submits) == 1 and not wire.received
        wire.leave()
        await settle()
        assert api.aborted == [api.submits[0].rid] and not api.registry.num_streams


# Number of connections


@virtual
async def test_connections_beyond_the_limit_are_closed() -> None:
    server = HttpServer(wait_if_posted, EngineConfig(max_connections=4))
    busy = [await server.ask(request_of(SMALL)) for _ in range(4)]
    assert server.connect().is_aborted and not any(wire.received or wire.is_closed for wire in busy)
    busy[0].leave()
    await settle()
    assert (await server.ask(GET_HEALTH)).statuses == [200]  # accepted in its place


def test_connections_fit_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each client of the proxy takes a connection to a replica too."""
    monkeypatch.setattr("resource.getrlimit", lambda _: (1000, 1000))
    assert connection_limit(EngineConfig(), 64, 2) == (1000 - 64) // 2
    assert connection_limit(EngineConfig(max_connections=5), 64, 2) == 5
    monkeypatch.setattr("resource.getrlimit", lambda _: (64, 64))
    assert connection_limit(EngineConfig(), 64, 2) == 1


@pytest.fixture
def garbage() -> Iterator[list[object]]:
    gc.collect()
    gc.freeze()  # what other tests left takes long to look at
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    yield gc.garbage
    gc.set_debug(0)
    gc.garbage.clear()
    gc.unfreeze()
    gc.enable()


@virtual
async def test_a_connection_leaves_no_cycle(garbage: list[object]) -> None:
    for app, num_bytes, num_sent in ((echo, 0, 0), (echo, 10, 10), (echo, 10**6, 10**6), (refuse, 10**6, 10**5), (echo, 10**6, 10**5)):
        wire, is_whole = HttpServer(app).connect(), num_sent == num_bytes
        for _ in range(1 + is_whole):
            wire.send(POST + b"Content-Length: %d\r\n\r\n" % num_bytes, *packets(b"x" * num_sent))
            await settle()
        assert len(wire.answers) == 2 * is_whole + (app is refuse)
        wire.leave()
        del wire
        await asyncio.sleep(LINGER_S + 0.1)
        gc.collect()
        assert not [thing for thing in garbage if isinstance(thing, LimitedProtocol | RequestResponseCycle | bytearray)]


# Clients that do not read

STREAM = request_of(text_body(stream=True))


@virtual
async def test_a_deadline_covers_the_writing(model_folder: Path) -> None:
    """--request-timeout ends a blocked write, of a stream and of a document."""
    with serving(model_folder, request_timeout=20) as api:
        api.script = say(*["token " * 10] * 3000)
        wires: list[Wire] = []
        for request in (STREAM, request_of(SMALL)):
            wires.append(api.connect())
            wires[-1].reads = False
            wires[-1].send(request)
        await settle()
        for _ in range(20 + WRITE_S - 1):
            assert not any(wire.is_closed for wire in wires)
            for wire in wires:
                wire.read(1)
            await asyncio.sleep(1)
        await asyncio.sleep(60)
        assert all(wire.is_aborted for wire in wires)


async def test_the_kernel_closes_a_connection_whose_client_reads_nothing() -> None:
    """--idle-timeout also ends a blocked write of the proxy and of a request without a deadline."""
    ended: list[bool] = []

    async def answer_at_length(scope: Scope, receive: Receive, send: Send) -> None:
        messages: list[Message] = [{"type": "http.response.start", "status": 200, "headers": []}]
        messages += [{"type": "http.response.body", "body": b"x" * 65536, "more_body": True}] * 1000
        for message in messages:
            await send(message)
        ended.append(scope["type"] == "http")

    config = EngineConfig(idle_timeout=1)
    server = make_server(answer_at_length, config.max_connections, config, grace=1)
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.listen(listener))
    await eventually_async(lambda: server.started, "the server")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, listener.getsockname())
        await asyncio.get_running_loop().sock_sendall(client, GET_HEALTH)
        await eventually_async(lambda: bool(ended), "the end of the write")
    server.should_exit = True
    await task


def test_unread_events_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry_module, "MAX_UNREAD_EVENTS", 100)
    registry = RequestRegistry(cast(Any, SimpleNamespace(send_bytes=lambda _: None)), cast(Any, None), 10)
    registry.check_open = lambda: None
    streams = [registry.submit([Submit(rid, "x", [], SamplingParams(), OutputOptions(), Stages())]) for rid in range(4)]
    for stream, count in zip(streams, (40, 20, 30, 45), strict=True):
        for _ in range(count):
            stream.push(Event(streams.index(stream), num_tokens=1))
    registry._drop_unread()
    assert [stream.num_unread for stream in streams] == [40, 20, 30, 0]
