"""Clients that ask and do not read: what they hold, for how long, and what others get meanwhile."""

import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config import EngineConfig
from engine.messages import Event, Submit
from server.http import client as client_module
from server.http import connection as connection_module
from server.http.client import Client
from server.http.connection import ConnectionLimiter, LimitedProtocol
from tests.unit.server.stack import MIB, Stack, answer_ids, answer_text
from tests.unit.server.test_direct import connect, head_of, read_answer

WRITE_S = 3
NUM_UNREAD = 30
SEND_BUFFER = 2 * (1 << 16)  # SEND_BYTES, as the kernel counts it


def body(**fields: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, **fields}).encode()


GET = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
POST = head_of(len(body())) + body()
STREAM = head_of(len(body(stream=True))) + body(stream=True)


@pytest.fixture(scope="module")
def strict(model_folder: Path) -> Iterator[Stack]:
    """A server with few connections, few places for requests and little time."""
    running = Stack(model_folder, max_connections=40, max_queued_requests=24, write_timeout=WRITE_S, idle_timeout=60)
    yield running
    running.close()


@pytest.fixture(autouse=True)
def clean(strict: Stack) -> Iterator[None]:
    strict.scheduler.script = answer_text
    yield
    strict.recover()


def ask_without_reading(stack: Stack, data: bytes) -> socket.socket:
    host, port = stack.url.partition("//")[2].split(":")
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect((host, int(port)))
    connection.sendall(data)
    return connection


def kernel_bytes(stack: Stack) -> list[int]:
    """What the kernel holds of the answers of each of the server's connections."""
    port = int(stack.url.rsplit(":", 1)[1])
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [int(row[4].split(":")[0], 16) for row in rows if int(row[1].split(":")[1], 16) == port and row[3] != "0A"]


def is_over(connection: socket.socket, seconds: float) -> bool:
    """Whether the server ends the connection within so many seconds: a byte now and then does not reach it then."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            connection.send(b"\r")
        except OSError:  # also of TLS
            return True
        time.sleep(0.1)
    return False


def open_streams(stack: Stack) -> float:
    found = re.search(r"^engine_open_streams\{.*\} (\S+)$", stack.http.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1])


def status_of(stack: Stack) -> int:
    """Of a good request."""
    with connect(stack) as connection:
        connection.sendall(POST)
        return read_answer(connection)[0]


@pytest.mark.parametrize("pipelined", [GET * 40 + POST, POST * 40, GET * 200])
def test_others_are_served_and_the_unread_end(strict: Stack, pipelined: bytes) -> None:
    """Red if clients that read nothing hold all connections, or all places for requests, or stay."""
    unread = [ask_without_reading(strict, pipelined) for _ in range(NUM_UNREAD)]
    time.sleep(WRITE_S)
    strict.wait_until(lambda: [status_of(strict) for _ in range(5)] == [200] * 5, 10 * WRITE_S)
    strict.wait_until(lambda: open_streams(strict) <= 1, 10 * WRITE_S)
    assert max(kernel_bytes(strict)) <= SEND_BUFFER
    assert pipelined == POST * 40 or all([is_over(connection, 2 * WRITE_S) for connection in unread])
    for connection in unread:
        connection.close()


def test_places_are_free_when_generation_ends(strict: Stack) -> None:
    """Red if an answer that nobody reads counts as a request that runs."""
    strict.scheduler.script = answer_ids([65 + i % 26 for i in range(6000)], step=10)
    unread = [ask_without_reading(strict, STREAM) for _ in range(4)]
    count = len(strict.scheduler.requests)
    strict.wait_until(lambda: len(strict.scheduler.requests) >= count and open_streams(strict) == 0)
    assert all([is_over(connection, 2 * WRITE_S) for connection in unread])


def test_a_slow_reader_gets_all_of_its_answer(strict: Stack) -> None:
    """Red if the time limit is one of the whole answer: this client takes three times as long, and reads all the time."""
    strict.scheduler.script = answer_ids([65 + i % 26 for i in range(2400)])
    connection, text, started = ask_without_reading(strict, STREAM), b"", time.monotonic()
    connection.settimeout(10)
    while b"[DONE]" not in text:
        text += connection.recv(1500)
        if time.monotonic() - started < 3 * WRITE_S:
            time.sleep(0.05)
    assert time.monotonic() - started > 3 * WRITE_S and text.count(b'"delta"') > 2400
    connection.close()


def test_a_deadline_covers_the_writing(model_folder: Path) -> None:
    """Red if a client that reads a byte now and then keeps its answer for longer than it may take."""
    running = Stack(model_folder, request_timeout=1, write_timeout=300)
    running.scheduler.script = answer_ids([65 + i % 26 for i in range(6000)], step=10)
    try:
        with ask_without_reading(running, STREAM) as connection:
            assert is_over(connection, 40)
    finally:
        running.close()


class Slow:
    """A connection that has so many bytes to be read, for a limiter."""

    def __init__(self, address: str, size: int):
        self.address, self.size, self.is_gone = address, size, False
        self.transport = SimpleNamespace(abort=self._abort)

    def _abort(self) -> None:
        self.is_gone = True

    def look(self, now: float) -> int:
        return self.size


def test_unsent_bytes_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if large answers to many clients fill the memory, or if others than those of the greediest address pay for it."""
    monkeypatch.setattr(connection_module, "MAX_UNSENT_BYTES", 10 * MIB)
    limiter = ConnectionLimiter(EngineConfig())
    greedy, modest = [Slow("a", 3 * MIB) for _ in range(4)], Slow("b", 4 * MIB)
    limiter._open |= cast("set[LimitedProtocol]", {*greedy, modest})
    limiter._look(cast(Any, SimpleNamespace(time=lambda: 0.0, call_later=lambda *_: None)))
    assert sum(one.is_gone for one in greedy) == 2 and not modest.is_gone


def test_unread_events_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if what the engine makes for clients that do not read fills the memory."""
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
