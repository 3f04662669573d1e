"""All ports have the same limits; what a connection costs, and what it leaves."""

import gc
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from server.http.direct import DirectProtocol, DirectReader, direct_reader
from tests.eventually import eventually
from tests.unit.server.in_process import HttpServer, echo, serving, settle, virtual
from tests.unit.server.raw_http import connect, packets, request_of, text_body
from tests.unit.server.stack import ROOT, Stack, hold

NUM_BUSY = 200
LISTENING = re.compile(r"\.(listen|create_server|start_server|serve_forever|AppRunner|TCPSite|Config|run_app)\(")
PLACES = {
    "server/http/listen.py: Config": "the limited server",
    "server/http/app.py: listen": "the api's port and that of metrics, by listen.py",
    "server/route.py: listen": "the proxy's, by listen.py",
    "server/route.py: create_server": "its socket",
    "engine/fleet.py: create_server": "asks for free ports",
}


def test_all_listeners_are_known() -> None:
    """Only `server/http/listen.py` opens ports, and limits them."""
    files = [file for folder in ("engine", "server", "models") for file in (ROOT / folder).rglob("*.py")]
    found = {f"{file.relative_to(ROOT)}: {name}" for file in files for name in LISTENING.findall(file.read_text())}
    assert found == PLACES.keys()


@virtual
async def test_heads_that_two_servers_read_in_two_ways() -> None:
    start = b"POST /v1/models HTTP/1.1\r\nHost: a\r\n"
    for head, status in (
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (start + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (start + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    ):
        assert (await HttpServer(echo).ask(head)).statuses == [status], head


@virtual
async def test_http_1_0_has_no_chunks(model_folder: Path) -> None:
    with serving(model_folder) as api:
        for stream in (False, True):
            wire = await api.ask(request_of(text_body(stream=stream)).replace(b"HTTP/1.1", b"HTTP/1.0"))
            head, _, text = wire.received.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head.lower() and wire.is_closed
            assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n") if stream else json.loads(text)["choices"]


def own_kib(pid: int) -> int:
    """A process's memory without the arenas."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


@pytest.mark.nightly
def test_a_connection_takes_a_bounded_part_of_the_memory(model_folder: Path) -> None:
    """As `docs/operations.md` says; each has a running request and sends another head."""
    promised = re.search(r"(\d+) KiB for each connection", (ROOT / "docs/operations.md").read_text())
    assert promised is not None
    running = Stack(model_folder)
    running.scheduler.script = hold
    pid = running.processes["api"].pid
    before, connections = own_kib(pid), [connect(running) for _ in range(NUM_BUSY)]
    for connection in connections:
        connection.sendall(request_of(text_body(stream=True)) + b"POST / HTTP/1.1\r\nX: " + b"y" * 60_000)
    eventually(lambda: len(running.scheduler.requests) == NUM_BUSY, "every request")
    eventually(lambda: (own_kib(pid) - before) / NUM_BUSY > int(promised[1]) / 4, "the memory of the second heads")
    assert (own_kib(pid) - before) / NUM_BUSY < int(promised[1])
    for connection in connections:
        connection.close()
    running.recover()
    running.close()


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
