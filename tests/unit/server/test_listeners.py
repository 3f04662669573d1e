"""Every port that the project opens has the same limits, and what HTTP they do not take."""

import ast
import json
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.server.stack import MIB, ROOT, Stack, answer_text, hold
from tests.unit.server.test_connections import CHUNKED
from tests.unit.server.test_direct import body_of, connect, from_elsewhere, head_of, large_image, read_answer

NUM_BUSY = 200
LISTENING = {"listen", "create_server", "start_server", "serve_forever", "AppRunner", "TCPSite", "Config", "run_app"}
PLACES = {
    "server/http/listen.py: Config": "the limited server",
    "server/http/app.py: listen": "the api's port and that of metrics, by listen.py",
    "server/route.py: listen": "the proxy's, by listen.py",
    "server/route.py: create_server": "its socket",
    "engine/fleet.py: create_server": "asks for free ports",
}


def test_all_listeners_are_known() -> None:
    """Red if a port is opened by another way than `server/http/listen.py`, which limits it."""
    found = set()
    for path in (file for folder in ("engine", "server", "models") for file in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""
            if name in LISTENING:
                found.add(f"{path.relative_to(ROOT)}: {name}")
    assert found == PLACES.keys()


@pytest.fixture(scope="module")
def two_ports(model_folder: Path) -> Iterator[Stack]:
    running = Stack(model_folder, metrics_port=0, header_timeout=1, idle_timeout=2, max_connections=5000)
    yield running
    running.close()


def connect_to(url: str) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(url.split(":")[2].split("/")[0])), timeout=20)


@pytest.mark.parametrize("port", ["main", "metrics"])
def test_a_port_has_the_limits(two_ports: Stack, port: str) -> None:
    """Red if a head of 100 MiB is read by any port, which stalled all others for seconds, or if unfinished ones stay."""
    url = two_ports.url if port == "main" else two_ports.metrics_url

    def send() -> None:
        with connect_to(url) as connection:
            try:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
                for _ in range(100):
                    connection.sendall(b"x" * MIB)
            except ConnectionError:
                return

    assert two_ports.keeps_answering(send)
    unfinished = [connect_to(url) for _ in range(40)]
    for connection in unfinished:
        connection.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
    assert all([b" 408 " in connection.recv(1000) for connection in unfinished])
    for connection in unfinished:
        connection.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 501),
    ],
)
def test_heads_that_two_servers_read_in_two_ways(two_ports: Stack, head: bytes, status: int) -> None:
    """Red if a proxy in front and this server can take a request for two different ones."""
    with connect(two_ports) as connection:
        connection.sendall(head)
        assert read_answer(connection)[0] == status


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_has_no_chunks(two_ports: Stack, stream: bool) -> None:
    """Red if a client that knows no chunks reads their lengths as text."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    with connect(two_ports) as connection:
        connection.sendall(head_of(len(body)).replace(b"HTTP/1.1", b"HTTP/1.0") + body)
        head, _, text = b"".join(iter(lambda: connection.recv(10_000), b"")).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert text.startswith(b"data: {") and text.endswith(b"data: [DONE]\n\n") if stream else json.loads(text)["choices"]


def test_a_body_of_one_byte_chunks(two_ports: Stack) -> None:
    """Red if whoever sends a byte at a time keeps others from being answered, or loses one."""
    two_ports.scheduler.script = answer_text
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 50_000}], "max_tokens": 1}).encode()
    chunked = b"POST /tokenize" + CHUNKED + b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"

    def send() -> None:
        with connect(two_ports) as connection:
            connection.sendall(chunked)
            assert read_answer(connection)[0] == 200

    assert two_ports.keeps_answering(send)


def test_two_of_the_largest_bodies_at_once(two_ports: Stack) -> None:
    """Red if two bodies that each nearly fill the arena end in anything but an answer and a 503. (512 MiB each by default; 8 here.)"""
    body = body_of(large_image(8 * MIB))
    with connect(two_ports) as first, from_elsewhere(two_ports) as second:
        for connection in (first, second):
            connection.sendall(head_of(len(body)) + body[:1000])
            time.sleep(0.2)
        assert read_answer(second)[0] == 503
        first.sendall(body[1000:])
        assert read_answer(first)[0] == 200


def own_kib(pid: int) -> int:
    """Of a process's memory, without the arenas."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def test_a_connection_takes_a_bounded_part_of_the_memory(two_ports: Stack) -> None:
    """Red if the api takes more for a connection than `docs/operations.md` says: here each has a request that runs, and sends on."""
    two_ports.scheduler.script = hold
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": True}).encode()
    before, count, connections = own_kib(two_ports.processes["api"].pid), len(two_ports.scheduler.requests), []
    for _ in range(NUM_BUSY):
        connections.append(connect(two_ports))
        connections[-1].sendall(head_of(len(body)) + body + b"POST / HTTP/1.1\r\nX: " + b"y" * 60_000)
    two_ports.wait_until(lambda: len(two_ports.scheduler.requests) == count + NUM_BUSY, 30)
    time.sleep(0.5)
    said = re.search(r"(\d+) KiB for each connection", (ROOT / "docs/operations.md").read_text())
    assert said is not None
    taken = (own_kib(two_ports.processes["api"].pid) - before) / NUM_BUSY
    assert int(said[1]) / 4 < taken < int(said[1]), taken
    for connection in connections:
        connection.close()
    two_ports.recover()


def test_thousands_of_idle_connections(two_ports: Stack) -> None:
    """Red if others wait for clients that only connect, or if they stay."""
    idle: list[socket.socket] = []

    def connect_many() -> None:
        while idle:
            idle.pop().close()
        idle.extend(connect(two_ports) for _ in range(2000))

    assert two_ports.keeps_answering(connect_many)
    time.sleep(1.5)
    assert all(connection.recv(1) == b"" for connection in idle)
    for connection in idle:
        connection.close()
    two_ports.recover()
