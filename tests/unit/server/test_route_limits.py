"""The proxy as a process, attacked: it has the api's limits, tells no secret, and holds a bounded part of bodies."""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.unit.server.stack import MIB, Stack, answer_ids, answer_text
from tests.unit.server.test_direct import head_of, read_answer
from tests.unit.server.test_unread import STREAM, ask_without_reading, is_over

SECRET = "sekret"
KEY = b"Authorization: Bearer " + SECRET.encode() + b"\r\n"
WRITE_S = 2


@dataclass
class Running:
    """A proxy before one api."""

    stack: Stack
    process: "subprocess.Popen[str]"
    log: Path
    url: str

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", int(self.url.rsplit(":", 1)[1])), timeout=20)

    def ask(self, data: bytes) -> tuple[int, dict[str, object]]:
        with self.connect() as connection:
            connection.sendall(data)
            return read_answer(connection)


@pytest.fixture(scope="module")
def running(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("proxy")
    (folder / "keys").write_text(SECRET + "\n")
    stack = Stack(model_folder, api_key=SECRET, api_arena_bytes=64 * MIB)
    stack.http.headers["x-api-key"] = SECRET
    flags = ["--port", "0", "--backends", stack.url, "--api-key-file", str(folder / "keys"), "--write-timeout", str(WRITE_S)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([sys.executable, "-m", "server.route", *flags], stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    yield Running(stack, process, folder / "log", process.stdout.readline().split()[2])
    process.terminate()
    process.wait()
    stack.close()


def with_key(data: bytes) -> bytes:
    return data.replace(b"\r\n", b"\r\n" + KEY, 1)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer " + SECRET.encode() + b"\0\r\n\r\n", 400),
        (b"GET /v1/models HTTP/1.1\r\nAuthorization: Bearer " + SECRET.encode() + b"\r\nX: " + b"x" * 70_000, 431),
        (b"GET /v1/models HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + KEY + b"\r\n", 400),
        (b"POST /v1/models HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n" + KEY + b"\r\n0\r\n\r\n", 501),
        (b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n", 401),
    ],
)
def test_what_is_refused_is_told_in_our_words(running: Running, data: bytes, status: int) -> None:
    """Red if a bad head is echoed, or a key stands in the log, or a body is awaited of somebody who has no key."""
    answered, error = running.ask(data)
    assert answered == status and set(error["error"]) == {"message", "type", "param", "code"}  # type: ignore[call-overload]
    assert SECRET not in json.dumps(error)
    log = running.log.read_text()
    assert SECRET not in log and "Traceback" not in log


def resident(process: "subprocess.Popen[str]") -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


def test_bodies_without_an_image_are_held_within_a_budget(running: Running) -> None:
    """Red if each of many clients has megabytes held before any key is found: 250 took 1,148 MiB."""
    before, clients = resident(running.process), [running.connect() for _ in range(250)]
    for client in clients:
        client.sendall(with_key(head_of(4 * MIB)))

    def send(client: socket.socket) -> None:
        client.settimeout(2)
        try:
            client.sendall(b" " * (4 * MIB - 1))
        except (TimeoutError, ConnectionError):
            return

    threads = [threading.Thread(target=send, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert resident(running.process) - before < 250 * MIB
    for client in clients:
        client.close()
    deadline = time.monotonic() + 20
    while running.stack.chat("x").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_unread_answers_end_here_too(running: Running) -> None:
    """Red if a client that reads nothing is kept by the proxy."""
    stack = running.stack
    stack.wait_until(lambda: [stack.chat("x").status_code for _ in range(5)] == [200] * 5)  # nothing of the test before is left
    stack.scheduler.script = answer_ids([65 + i % 26 for i in range(8000)], step=2)
    url, stack.url = stack.url, running.url
    try:
        unread = [ask_without_reading(stack, with_key(STREAM)) for _ in range(4)]
        assert all([is_over(connection, 15) for connection in unread])
    finally:
        stack.url = url
        stack.scheduler.script = answer_text
