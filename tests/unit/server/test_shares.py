"""Slow clients: what they may hold, and for how long, while others come and go."""

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config import EngineConfig
from server.errors import RequestError
from server.http.connection import ConnectionLimiter, LimitedProtocol
from server.http.shares import Shares, host_of
from tests.unit.server.stack import MIB, Stack
from tests.unit.server.test_connections import CHUNKED
from tests.unit.server.test_direct import body_of, connect, from_elsewhere, head_of, is_answered, large_image, read_answer

ADDRESSES = [
    ("10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"), ("2001:db8:1:2::/64", "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "fe80::/64"), ("::ffff:10.0.0.1", "10.0.0.1"), ("", ""), ("a:b", "a:b"),
]  # fmt: skip
SLOW = b"POST /v1/chat/completions" + CHUNKED + b"1\r\n{\r\n"


@pytest.mark.parametrize(("address", "host"), ADDRESSES)
def test_whose_share_an_address_has(address: str, host: str) -> None:
    """Red if an IPv6 client, which may use 2**64 addresses, has as many shares, or one of IPv4 several."""
    assert host_of(address) == host


def test_addresses_of_one_prefix_share() -> None:
    """Red if a limit counts the addresses of one IPv6 client one by one."""
    shares, limiter = Shares(1 * MIB, small_bytes=0), ConnectionLimiter(EngineConfig(max_connections=8))
    with shares.claim("2001:db8::1") as one, shares.claim("2001:db8::2") as other, shares.claim("2001:db8:0:1::1") as foreign:
        one.grow_to(600_000)
        with pytest.raises(RequestError):
            other.grow_to(200_000)
        foreign.grow_to(200_000)
    for number in range(1, 9):
        connection = LimitedProtocol.__new__(LimitedProtocol)
        connection.address, connection.loop = (
            host_of(f"2001:db8::{number}"),
            cast(Any, SimpleNamespace(time=float, call_later=lambda *_: 0)),
        )
        assert (limiter.admit(connection) > 0) == (number > 6)


def send(stack: Stack, data: bytes) -> socket.socket:
    connection = connect(stack)
    connection.sendall(data)
    return connection


def status_of(connection: socket.socket, body: bytes) -> int:
    with connection:
        connection.sendall(head_of(len(body)) + body)
        return read_answer(connection)[0]


def test_bodies_without_a_length_that_do_not_come(stack: Stack) -> None:
    """Red if a byte is enough to have a megabyte reserved: a thousand connections would hold a gigabyte."""
    slow = [send(stack, SLOW) for _ in range(100)]
    time.sleep(0.2)
    assert status_of(connect(stack), body_of(large_image(4 * MIB))) == 200
    for connection in slow:
        connection.close()


def test_two_slow_clients_do_not_keep_others_out(stack: Stack) -> None:
    """Red if what a few have announced, and do not send, leaves no room for a small body, or for another address."""
    slow = [send(stack, head_of(6 * MIB) + b"{") for _ in range(2)]
    time.sleep(0.2)
    with connect(stack) as third:
        third.sendall(head_of(3 * MIB))
        assert read_answer(third)[0] == 503
    large, small = body_of(large_image(MIB + 100_000)), json.dumps({"messages": [{"role": "user", "content": "x" * 5000}]}).encode()
    assert (status_of(connect(stack), large), status_of(connect(stack), small)) == (503, 200)
    assert status_of(from_elsewhere(stack), large) == 200
    more = from_elsewhere(stack)
    more.sendall(head_of(2 * MIB) + b"{")
    time.sleep(0.1)
    assert status_of(from_elsewhere(stack), large) == 503
    assert status_of(from_elsewhere(stack), small) == 200
    for connection in (*slow, more):
        connection.close()


def test_a_single_large_body_is_taken(stack: Stack) -> None:
    """Red if the share of an address bounds what one request may have, or if a limit is told that is none."""
    assert status_of(connect(stack), body_of(large_image(9 * MIB))) == 200
    with connect(stack) as connection:
        connection.sendall(head_of(15 * MIB))
        status, error = read_answer(connection)
        assert status == 413 and str(14 * MIB) in str(error)


@pytest.fixture(scope="module")
def impatient(model_folder: Path) -> Iterator[Stack]:
    """A server that waits a second for a body, and ten for a large one."""
    running = Stack(model_folder, body_timeout=1)
    yield running
    running.close()


@pytest.mark.parametrize(("length", "status"), [(9 * MIB, 408), (MIB // 2, 200)])
def test_who_promises_more_must_send_faster(impatient: Stack, length: int, status: int) -> None:
    """Red if a rate that is fair for a small body lets a large one keep its memory for hours."""
    body, started = body_of(large_image(length)), time.monotonic()
    with connect(impatient) as connection:
        connection.sendall(head_of(len(body)))
        for start in range(0, len(body), 50_000):
            connection.sendall(body[start : start + 50_000])
            if is_answered(connection, 0.1):
                break
        assert read_answer(connection)[0] == status
        assert time.monotonic() - started < 4
