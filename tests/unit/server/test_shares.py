"""Slow clients: how much memory and how many connections they may hold while others come and go."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.config import EngineConfig
from server.errors import RequestError
from server.http.connection import ConnectionLimiter, LimitedProtocol
from server.http.shares import Shares, host_of
from tests.unit.server.in_process import MIB, Wire, serving, settle, virtual
from tests.unit.server.raw_http import CHUNKED, body_of, head_of, large_image, packets, request_of, text_body

ADDRESSES = [
    ("10.0.0.1", "10.0.0.1"), ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"), ("2001:db8:1:2::/64", "2001:db8:1:2::/64"),
    ("fe80::1%eth0", "fe80::/64"), ("::ffff:10.0.0.1", "10.0.0.1"), ("", ""), ("a:b", "a:b"),
]  # fmt: skip
SLOW = b"POST /v1/chat/completions" + CHUNKED + b"1\r\n{\r\n"
ELSEWHERE = "10.0.0.2"


def test_whose_share_an_address_has() -> None:
    """Fails if an IPv6 client, which may use 2**64 addresses, has as many shares, or one of IPv4 several."""
    for address, host in ADDRESSES:
        assert host_of(address) == host


def test_addresses_of_one_prefix_share() -> None:
    """Fails if a limit counts the addresses of one IPv6 client one by one."""
    shares, limiter = Shares(1 * MIB, small_bytes=0), ConnectionLimiter(EngineConfig(max_connections=8))
    with shares.claim("2001:db8::1") as one, shares.claim("2001:db8::2") as other, shares.claim("2001:db8:0:1::1") as foreign:
        one.grow_to(600_000)
        with pytest.raises(RequestError):
            other.grow_to(200_000)
        foreign.grow_to(200_000)
    loop = cast(Any, SimpleNamespace(time=float, call_later=lambda *_: 0))
    for number in range(1, 9):
        connection = LimitedProtocol.__new__(LimitedProtocol)
        connection.address, connection.loop = host_of(f"2001:db8::{number}"), loop
        assert (limiter.admit(connection) > 0) == (number > 6)


@virtual
async def test_slow_clients_do_not_keep_others_out(model_folder: Path) -> None:
    """Fails if one byte is enough to have a megabyte reserved, or if what a few clients have announced, and do not send, leaves no room
    for a small body or for another address."""
    large, small = body_of(large_image(MIB + 100_000)), text_body("x" * 5000)
    with serving(model_folder) as api:

        async def status_of(body: bytes, address: str = "10.0.0.1") -> int:
            return (await api.ask(*packets(request_of(body)), address=address)).statuses[0]

        async def leave(wires: list[Wire]) -> None:
            for wire in wires:
                assert not wire.received
                wire.leave()
            await settle()

        without_length = [await api.ask(SLOW) for _ in range(100)]
        assert await status_of(body_of(large_image(4 * MIB))) == 200
        await leave(without_length)
        slow = [await api.ask(head_of(6 * MIB) + b"{") for _ in range(2)]
        assert (await api.ask(head_of(3 * MIB))).statuses == [503]
        assert (await status_of(large), await status_of(small), await status_of(large, ELSEWHERE)) == (503, 200, 200)
        slow.append(await api.ask(head_of(2 * MIB) + b"{", address=ELSEWHERE))
        assert (await status_of(large, ELSEWHERE), await status_of(small, ELSEWHERE)) == (503, 200)
        await leave(slow)
        assert await status_of(large) == 200


@virtual
async def test_one_large_body_is_accepted(model_folder: Path) -> None:
    """Fails if the share of an address bounds a single request, if the stated limit is wrong, or if two bodies that each nearly fill the
    arena end in anything but an answer and a 503."""
    body = body_of(large_image(9 * MIB))
    with serving(model_folder) as api:
        wire = await api.ask(head_of(len(body)))
        assert (await api.ask(head_of(len(body)), address=ELSEWHERE)).statuses == [503]
        wire.send(*packets(body))
        await settle()
        assert wire.statuses == [200]
        ((status, error),) = (await api.ask(head_of(15 * MIB))).answers
        assert status == 413 and b"%d" % (14 * MIB) in error
