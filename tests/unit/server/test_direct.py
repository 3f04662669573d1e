"""Large bodies that go past the HTTP parser: what comes after them on the same connection, and what happens when they break off."""

import json
import os
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.server.pictures import PLAIN
from tests.unit.server.stack import MIB, Stack, hold_silently
from tests.unit.server.test_stack import image, uri

JPEG = PLAIN["4:2:0"]


def large_image(num_bytes: int) -> bytes:
    """A JPEG with `num_bytes` of noise in its comments."""
    comment = b"\xff\xfe\xff\xff" + os.urandom(65_533)
    return JPEG[:2] + comment * (num_bytes // len(comment)) + JPEG[2:]


def body_of(*images: bytes) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [image(uri(data)) for data in images]}]}).encode()


def head_of(length: int) -> bytes:
    return f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n".encode()


def connect(stack: Stack) -> socket.socket:
    host, port = stack.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def from_elsewhere(stack: Stack) -> socket.socket:
    """A client of another address of this machine."""
    host, port = stack.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20, source_address=("127.0.0.2", 0))


def read_answer(connection: socket.socket) -> tuple[int, dict[str, object]]:
    """Status and JSON of the next answer on the connection."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(1)
    length = int(data.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(data.split()[1]), json.loads(body)


@pytest.mark.parametrize("cut", [10, 100_000, 3_000_000])
def test_large_bodies_and_small_ones_share_a_connection(stack: Stack, cut: int) -> None:
    """Red if a byte is lost where the reader takes over or hands back, also with the next request right behind the body."""
    images = [large_image(size) for size in (1_000_000, 2_000_000, 300_000)]
    large, small = body_of(*images), body_of(JPEG)
    messages = head_of(len(large)) + large + head_of(len(small)) + small
    with connect(stack) as connection:
        for _ in range(2):
            connection.sendall(messages[:cut])
            assert stack.http.get("/health").status_code == 200
            connection.sendall(messages[cut:])
            assert [read_answer(connection)[0] for _ in range(2)] == [200, 200]
            request = stack.scheduler.requests[-2]
            assert [span.source.region.length for span in request.images] == [len(data) for data in images]
            assert stack.scheduler.requests[-1].images[0].source.region.length == len(JPEG)


def test_a_refused_body_is_read_to_its_end(stack: Stack) -> None:
    """Red if a client that sends too much text cannot read why, or its connection is unusable afterwards."""
    text = json.dumps({"messages": [{"role": "user", "content": "x" * (12 * MIB)}]}).encode()
    small = body_of(JPEG)
    with connect(stack) as connection:
        connection.sendall(head_of(len(text)) + text)
        status, error = read_answer(connection)
        assert status == 413 and "besides its images" in str(error)
        connection.sendall(head_of(len(small)) + small)
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_client_that_leaves_in_a_large_body(stack: Stack, share: float) -> None:
    """Red if the region of a body that breaks off is not given back: `clean` would find the arena in use."""
    body = body_of(large_image(4_000_000))
    connection = connect(stack)
    connection.sendall(head_of(len(body)) + body[: int(share * len(body))])
    connection.close()
    assert stack.chat("still there?").status_code == 200


@pytest.fixture(scope="module")
def impatient(model_folder: Path) -> Iterator[Stack]:
    """A server that waits a second for a body."""
    running = Stack(model_folder, body_timeout=1)
    yield running
    running.close()


def is_answered(connection: socket.socket, seconds: float) -> bool:
    return bool(select.select([connection], [], [], seconds)[0])


@pytest.mark.parametrize("num_sent", [0, 1_000_000])
def test_a_body_that_pauses_is_given_up(impatient: Stack, num_sent: int) -> None:
    """Red if a client that sends no more keeps the memory that it was promised."""
    body = body_of(large_image(4_000_000))
    with connect(impatient) as connection:
        connection.sendall(head_of(len(body)) + body[:num_sent])
        status, error = read_answer(connection)
        assert status == 408 and "too slowly" in str(error)
        impatient.settle()


@pytest.mark.parametrize("length", [100_000, 4_000_000])
def test_a_body_that_drips_is_given_up(impatient: Stack, length: int) -> None:
    """Red if a byte now and then is enough to keep it, read by the parser or directly."""
    body, sent, started = body_of(large_image(length)), 0, time.monotonic()
    with connect(impatient) as connection:
        connection.sendall(head_of(len(body)))
        while not is_answered(connection, 0.1) and time.monotonic() - started < 10:
            connection.sendall(body[sent : sent + 1])
            sent += 1
        assert read_answer(connection)[0] == 408 and time.monotonic() - started < 5
        impatient.settle()


@pytest.mark.parametrize(("length", "pause"), [(2_000_000, 0.07), (700_000, 0.3)])
def test_a_body_that_comes_steadily_may_take_longer(impatient: Stack, length: int, pause: float) -> None:
    """Red if the timeout bounds the whole body, or a piece that is read at once: the client is slow, but not that slow."""
    body = body_of(large_image(length))
    with connect(impatient) as connection:
        connection.sendall(head_of(len(body)))
        for start in range(0, len(body), 100_000):
            connection.sendall(body[start : start + 100_000])
            time.sleep(pause)
        assert read_answer(connection)[0] == 200


@pytest.mark.parametrize("is_large", [False, True])
@pytest.mark.parametrize("is_cut", [False, True])
def test_an_offer_to_upgrade_changes_nothing(stack: Stack, is_large: bool, is_cut: bool) -> None:
    """Red if a client that would like HTTP/2, as Java's always does, gets its body dropped; in one packet with its headers or not."""
    body = body_of(large_image(1_000_000) if is_large else JPEG)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n\r\n"
    head = head_of(len(body))[:-2] + offer
    with connect(stack) as connection:
        for _ in range(2):
            connection.sendall(head if is_cut else head + body)
            time.sleep(0.1 * is_cut)
            connection.sendall(body if is_cut else b"")
            assert read_answer(connection)[0] == 200


def test_a_client_that_leaves_with_two_requests_under_way(stack: Stack) -> None:
    """Red if the engine works on for the first of them."""
    stack.scheduler.script = hold_silently
    body = body_of(JPEG)
    count = len(stack.scheduler.requests)
    connection = connect(stack)
    connection.sendall(head_of(len(body)) + body + b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
    stack.wait_until(lambda: len(stack.scheduler.requests) > count)
    connection.close()
    stack.wait_until(lambda: stack.scheduler.requests[-1].rid in stack.scheduler.aborted)
