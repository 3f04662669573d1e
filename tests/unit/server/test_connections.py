"""What a connection may cost before anybody knows who is there, and clients that close their side early."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from server.http.connection import MIN_WAIT_S
from tests.unit.server.pictures import PLAIN
from tests.unit.server.stack import MIB, Stack, hold_silently
from tests.unit.server.test_direct import body_of, connect, from_elsewhere, head_of, read_answer

GET_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
SMALL = json.dumps({"messages": [{"role": "user", "content": "x"}]}).encode()


@pytest.fixture
def stack(process_stack: Stack) -> Stack:
    return process_stack


def resident(stack: Stack) -> int:
    """Bytes of memory that the api has."""
    return int(Path(f"/proc/{stack.processes['api'].pid}/statm").read_text().split()[1]) * 4096


def send_until_closed(connection: socket.socket, head: bytes, piece: bytes, num_bytes: int) -> None:
    try:
        connection.sendall(head)
        for _ in range(num_bytes // len(piece)):
            connection.sendall(piece)
    except ConnectionError:
        pass


CHUNKED = b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
ENDLESS = {
    "one header": (b"GET /v1/models HTTP/1.1\r\nX: ", b"x" * 65536, 431),
    "many headers": (b"GET /v1/models HTTP/1.1\r\n", b"a: b\r\n" * 10_000, 431),
    "a URL": (b"GET /", b"x" * 65536, 414),
    "trailers": (b"POST /v1/chat/completions" + CHUNKED + b"0\r\nX: ", b"x" * 65536, 431),
    "an extension of a chunk": (b"POST /tokenize" + CHUNKED + b"1;", b"x" * 65536, 431),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_a_head_without_end_is_refused_early(stack: Stack, name: str) -> None:
    """Red if what anybody may send without a key takes memory, or if the client cannot read why it was refused."""
    head, piece, status = ENDLESS[name]
    before = resident(stack)
    with connect(stack) as connection:
        send_until_closed(connection, head, piece, 60 * MIB)
        assert resident(stack) - before < 8 * MIB
        answered, error = read_answer(connection)
    assert answered == status and "too l" in str(error)


@pytest.fixture(scope="module")
def strict(model_folder: Path) -> Iterator[Stack]:
    """A server that is short of time and connections."""
    running = Stack(model_folder, header_timeout=1, idle_timeout=2, max_connections=4)
    yield running
    running.close()


@pytest.mark.parametrize("sent", [b"", b"GET /v1/mod", b"GET /health HTTP/1.1\r\nX-Slow: "])
def test_a_head_that_does_not_end_is_given_up(strict: Stack, sent: bytes) -> None:
    """Red if a socket without a request stays for ever, dripping or silent."""
    with connect(strict) as connection:
        connection.sendall(sent)
        started = time.monotonic()
        answer = b"".join(iter(lambda: connection.recv(1000), b""))
        assert 0.5 < time.monotonic() - started < 4
        assert answer.startswith(b"HTTP/1.1 408 ") == bool(sent)


def test_an_idle_connection_is_closed_and_one_in_use_is_not(strict: Stack) -> None:
    """Red if connections without a request are kept, or if the pause between two requests ends one too early."""
    with connect(strict) as connection:
        for _ in range(3):
            connection.sendall(GET_HEALTH)
            assert read_answer(connection)[0] == 200
            time.sleep(1.2)
        started = time.monotonic()
        assert connection.recv(1) == b"" and time.monotonic() - started < 3


def test_idle_connections_make_room(strict: Stack) -> None:
    """Red if whoever opens connections and is silent keeps everybody out."""
    idle = [connect(strict) for _ in range(30)]
    time.sleep(MIN_WAIT_S + 0.5)  # the server may have accepted the first one late
    with connect(strict) as connection:
        connection.sendall(head_of(len(SMALL)) + SMALL)
        assert read_answer(connection)[0] == 200
    for other in idle:
        other.close()


def test_health_is_told_when_all_connections_are_at_work(strict: Stack) -> None:
    """Red if clients that wait for answers keep the load balancer from seeing that all is well, if one too many is let in, or if those of
    one address take all connections."""
    strict.scheduler.script = hold_silently
    count = len(strict.scheduler.requests)
    busy = [connect(strict) for _ in range(3)]
    for connection in busy:
        connection.sendall(head_of(len(SMALL)) + SMALL)
    strict.wait_until(lambda: len(strict.scheduler.requests) == count + 3)
    with connect(strict) as connection:
        connection.sendall(head_of(len(SMALL)) + SMALL)
        assert read_answer(connection)[0] == 503
    busy.append(from_elsewhere(strict))
    busy[-1].sendall(head_of(len(SMALL)) + SMALL)
    strict.wait_until(lambda: len(strict.scheduler.requests) == count + 4)
    for request, status in ((GET_HEALTH, 200), (head_of(len(SMALL)) + SMALL, 503), (GET_HEALTH, 200)):
        with connect(strict) as connection:
            connection.sendall(request)
            assert read_answer(connection)[0] == status
    for connection in busy:
        connection.close()
    strict.wait_until(lambda: len(strict.scheduler.aborted) >= 4)
    strict.recover()


def test_as_many_files_as_there_may_be(stack: Stack) -> None:
    """Red if a process keeps the limit of open files that it was started with."""
    for process in stack.processes.values():
        limits = Path(f"/proc/{process.pid}/limits").read_text().partition("Max open files")[2].split()
        assert limits[0] == limits[1]


@pytest.mark.parametrize("is_cut", [False, True])
def test_the_offer_to_upgrade_in_pieces(stack: Stack, is_cut: bool) -> None:
    """Red if a header that is split over packets is another one: the parser would drop the body."""
    body = body_of(PLAIN["4:2:0"])
    head = head_of(len(body))[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
    cut = head.index(b"Upgrade: h2c") + 4
    with connect(stack) as connection:
        for piece in (head[:cut], head[cut:] + body) if not is_cut else [bytes([byte]) for byte in head + body]:
            connection.sendall(piece)
            time.sleep(0.05 * (not is_cut))
        assert read_answer(connection)[0] == 200


def test_requests_behind_a_chunked_body(stack: Stack) -> None:
    """Red if heads that reach the parser in one packet with a body, whole or in part, are lost."""
    chunked = b"POST /v1/chat/completions" + CHUNKED + b"%x\r\n%s\r\n0\r\n\r\n" % (len(SMALL), SMALL)
    second = head_of(len(SMALL)) + SMALL
    for cut in (0, 30, len(second) - 5, len(second)):
        with connect(stack) as connection:
            connection.sendall(chunked + second[:cut])
            time.sleep(0.05)
            connection.sendall(second[cut:] + GET_HEALTH)
            assert [read_answer(connection)[0] for _ in range(3)] == [200, 200, 200]


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_side_is_answered(stack: Stack, stream: bool) -> None:
    """Red if the end of what a client sends is taken for the end of its interest."""
    body = json.dumps({"messages": [{"role": "user", "content": "x"}], "stream": stream}).encode()
    with connect(stack) as connection:
        connection.sendall(head_of(len(body)) + body)
        connection.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: connection.recv(10_000), b""))
    assert b"HTTP/1.1 200 OK\r\n" in answer and b'"finish_reason":"stop"' in answer


def test_a_client_that_leaves_without_a_word_is_noticed(stack: Stack) -> None:
    """Red if a connection that was closed for good is taken for one that only sends no more."""
    stack.scheduler.script = hold_silently
    count = len(stack.scheduler.requests)
    connection = connect(stack)
    connection.sendall(head_of(len(SMALL)) + SMALL)
    stack.wait_until(lambda: len(stack.scheduler.requests) > count)
    connection.close()
    stack.wait_until(lambda: stack.scheduler.requests[-1].rid in stack.scheduler.aborted, 2)


def test_a_refused_body_must_come_to_an_end(strict: Stack) -> None:
    """Red if a client that was answered keeps its connection by sending on and on."""
    with connect(strict) as connection:
        connection.sendall(b"POST /nowhere" + CHUNKED)
        assert read_answer(connection)[0] == 404
        started = time.monotonic()
        connection.settimeout(0.1)
        while time.monotonic() - started < 10:
            try:
                connection.sendall(b"1\r\nx\r\n")
                if connection.recv(1) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - started < 5


def test_large_heads_that_end_are_read(stack: Stack) -> None:
    """Red if the limit on heads is lower than what proxies and cookies make of them."""
    with connect(stack) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nCookie: " + b"x" * 60_000 + b"\r\n\r\n")
            assert read_answer(connection)[0] == 200


def test_the_same_complaint_is_not_logged_for_every_request(model_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Red if whoever sends rubbish fills the log."""
    running = Stack(model_folder)
    for _ in range(50):
        with connect(running) as connection:
            connection.sendall(b"\x16\x03\x01 rubbish\r\n\r\n")
            assert read_answer(connection)[0] == 400
    running.close()
    assert capfd.readouterr().err.count("Invalid HTTP") == 1
