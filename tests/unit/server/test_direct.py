"""Large bodies that bypass the HTTP parser: the next request on the connection, bodies that break off, and bodies that come slowly."""

import asyncio
import base64
import json
from pathlib import Path

import pytest

from server.http.body import MIN_BYTES_PER_S, Pace
from server.http.direct import DirectReader
from tests.unit.server.in_process import MIB, Wire, hold, serving, settle, virtual
from tests.unit.server.raw_http import CHUNKED, GET_HEALTH, JPEG, body_of, head_of, large_image, packets, request_of, text_body

TIMEOUT_S = 30


@pytest.fixture
def num_direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each body that was read directly."""
    found: list[int] = []
    take_over = DirectReader.take_over
    monkeypatch.setattr(DirectReader, "take_over", lambda self, num_bytes: found.append(num_bytes) or take_over(self, num_bytes))
    return found


@virtual
async def test_large_bodies_and_small_ones_share_a_connection(model_folder: Path, num_direct: list[int]) -> None:
    """Fails if a byte is lost where the reader takes over or hands back, also if the next request follows the body in the same packet, or
    if a client that offers HTTP/2, as Java's always does, gets its body dropped."""
    images = [large_image(size) for size in (500_000, 900_000, 300_000)]
    large, small = body_of(*images), body_of(JPEG)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n\r\n"
    heads = head_of(len(large)), head_of(len(large))[:-2] + offer
    expected = [[base64.b64encode(data) for data in images], [base64.b64encode(JPEG)]]
    with serving(model_folder) as api:
        for head in heads:
            messages = head + large + request_of(small)
            for cut in (10, len(head), 100_000, 1_900_000, len(messages) - len(small) - 20):
                api.media.clear()
                wire = await api.ask(*packets(messages[:cut]))
                wire.send(*packets(messages[cut:]), *packets(messages))
                await settle()
                assert wire.statuses == [200] * 4 and api.media == expected * 2, cut
                wire.leave()
    assert len(num_direct) == 20 and min(num_direct) > MIB


@virtual
async def test_a_refused_body_is_read_to_its_end(model_folder: Path, num_direct: list[int]) -> None:
    """Fails if a client that sends too much text cannot read why, or if its connection is unusable afterwards."""
    with serving(model_folder) as api:
        wire = await api.ask(*packets(request_of(text_body("x" * (12 * MIB)))), request_of(body_of(JPEG)))
        ((status, error), (following, _)) = wire.answers
    assert (status, following, len(num_direct)) == (413, 200, 1) and b"besides its images" in error


@virtual
async def test_a_client_that_leaves_during_a_large_body(model_folder: Path) -> None:
    """Fails if the region of a body that breaks off is not given back: `serving` would find the arena in use."""
    body = body_of(large_image(4_000_000))
    with serving(model_folder) as api:
        for share in (0.01, 0.2, 0.9):
            wire = await api.ask(*packets(head_of(len(body)) + body[: int(share * len(body))]))
            assert not api.api.arena.is_empty()
            wire.leave()
            await settle()
            assert api.api.arena.is_empty() and not api.submits


def test_the_pace_of_a_body() -> None:
    """Fails if a pause or a drip is tolerated for longer than the timeout, if a steady client is refused however long its body takes, or
    if a rate that is fair for a small body lets a large one keep its memory for hours."""

    def seconds_until_late(num_promised: int, bytes_per_s: float) -> float:
        pace, seconds = Pace(1000.0, TIMEOUT_S, num_promised), 0.0
        while seconds * bytes_per_s < num_promised:
            try:
                assert 0 < pace.timeout(int(seconds * bytes_per_s), 1000.0 + seconds) <= TIMEOUT_S
            except TimeoutError:
                return seconds
            seconds += 0.25
        return float("inf")

    assert Pace(1000.0, TIMEOUT_S, 4 * MIB).timeout(3 * MIB, 1000.0) == TIMEOUT_S  # far ahead
    assert seconds_until_late(4 * MIB, 0) == seconds_until_late(1000, 0) == TIMEOUT_S
    assert TIMEOUT_S <= seconds_until_late(4 * MIB, 1) <= TIMEOUT_S + 1
    assert seconds_until_late(4 * MIB, MIN_BYTES_PER_S) == float("inf")
    assert seconds_until_late(100 * MIB, MIN_BYTES_PER_S) < 2 * TIMEOUT_S
    assert seconds_until_late(100 * MIB, 100 * MIB / (10 * TIMEOUT_S)) == float("inf")


async def drip(wire: Wire, body: bytes, num_bytes: int, pause: float) -> float:
    """Send so many bytes of a body after each pause until there is an answer. Returns the seconds that passed."""
    wire.send(head_of(len(body)))
    loop = asyncio.get_running_loop()
    started, sent = loop.time(), 0
    while not wire.received and loop.time() - started < 1000:
        wire.send(body[sent : sent + num_bytes])
        sent += num_bytes
        await asyncio.sleep(pause)
    return loop.time() - started


@virtual
async def test_a_slow_body_is_given_up(model_folder: Path, num_direct: list[int]) -> None:
    """Fails if a client that pauses, or sends a byte now and then, keeps the memory that it was promised, whether the parser reads its body
    or it is read directly; or if a steady client is refused."""
    small, large, steady = body_of(large_image(100_000)), body_of(large_image(4_000_000)), body_of(large_image(2_000_000))
    with serving(model_folder, body_timeout=TIMEOUT_S) as api:

        async def answer(body: bytes, num_bytes: int, pause: float) -> tuple[int, float]:
            wire = api.connect()
            seconds = await drip(wire, body, num_bytes, pause)
            ((status, text),) = wire.answers
            assert status == 200 or "too slowly" in json.loads(text)["error"]["message"]
            return status, seconds

        for body in (small, large):
            for num_bytes, pause in ((0, 1.0), (1, 1.0), (1_000, 1.0)):
                status, seconds = await answer(body, num_bytes, pause)
                assert status == 408 and TIMEOUT_S <= seconds < TIMEOUT_S + 8, (len(body), num_bytes)
        wire = await api.ask(*packets(head_of(len(large)) + large[:3_000_000]))  # far ahead of its pace
        await asyncio.sleep(2 * TIMEOUT_S + 1)
        assert wire.statuses == [408]
        status, seconds = await answer(steady, 40_000, 1.0)
        assert status == 200 and seconds > 2 * TIMEOUT_S
    assert len(num_direct) > 2


@virtual
async def test_a_client_that_leaves_with_two_requests(model_folder: Path) -> None:
    with serving(model_folder) as api:
        api.script = hold
        wire = await api.ask(request_of(body_of(JPEG)) + GET_HEALTH)
        assert len(api.submits) == 1 and not wire.received
        wire.leave()
        await settle()
        assert api.aborted == [api.submits[0].rid] and not api.client.num_streams


@virtual
async def test_slow_bodies_leave_memory_for_small_ones(model_folder: Path) -> None:
    """Fails if one byte is enough to have a megabyte reserved, if bodies that were announced and do not come keep small ones out, or if the
    stated limit is wrong."""
    large, small = body_of(large_image(MIB + 100_000)), text_body("x" * 5000)
    with serving(model_folder) as api:

        async def statuses(*bodies: bytes) -> list[int]:
            return [(await api.ask(*packets(request_of(body)))).statuses[0] for body in bodies]

        async def leave(wires: list[Wire]) -> None:
            assert not any(wire.received for wire in wires)
            for wire in wires:
                wire.leave()
            await settle()

        without_length = [await api.ask(b"POST /v1/chat/completions" + CHUNKED + b"1\r\n{\r\n") for _ in range(100)]
        assert await statuses(body_of(large_image(4 * MIB))) == [200]
        await leave(without_length)
        slow = [await api.ask(head_of(6 * MIB) + b"{") for _ in range(2)]
        assert (await api.ask(head_of(3 * MIB))).statuses == [503]
        assert await statuses(large, small) == [200, 200]
        slow.append(await api.ask(head_of(2 * MIB) + b"{"))
        assert await statuses(large, small) == [503, 200]
        await leave(slow)
        wire = await api.ask(head_of(9 * MIB))
        assert (await api.ask(head_of(9 * MIB))).statuses == [503]
        await leave([wire])
        ((status, error),) = (await api.ask(head_of(15 * MIB))).answers
        assert status == 413 and b"%d" % (14 * MIB) in error
