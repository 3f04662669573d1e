"""Bodies of requests: large ones, truncated ones and slow ones."""

import asyncio
import base64
import json
from pathlib import Path

from server.api.http.body import MIN_BYTES_PER_S, Pace
from server.api.http.connection import LINGER_S
from tests.unit.server.in_process import MIB, Wire, serving, settle, virtual
from tests.unit.server.raw_http import CHUNKED, JPEG, body_of, head_of, large_image, packets, request_of, text_body

TIMEOUT_S = 30


@virtual
async def test_large_bodies_and_small_ones_share_a_connection(model_folder: Path) -> None:
    """Fails if a byte of a payload is lost, also if the next request follows the body in the same packet."""
    images = [large_image(size) for size in (500_000, 900_000, 300_000)]
    large, small = body_of(*images), body_of(JPEG)
    expected = [[base64.b64encode(data) for data in images], [base64.b64encode(JPEG)]]
    with serving(model_folder) as api:
        messages = request_of(large) + request_of(small)
        for cut in (10, 150, 100_000, 1_900_000, len(messages) - len(small) - 20):
            api.media.clear()
            wire = await api.ask(*packets(messages[:cut]))
            wire.send(*packets(messages[cut:]), *packets(messages))
            await settle()
            assert wire.statuses == [200] * 4 and api.media == expected * 2, cut
            wire.leave()


@virtual
async def test_too_much_text_is_refused_with_the_reason(model_folder: Path) -> None:
    with serving(model_folder) as api:
        wire = await api.ask(*packets(request_of(text_body("x" * (12 * MIB)))))
        ((status, error),) = wire.answers
        assert status == 413 and b"besides its images" in error
        await asyncio.sleep(LINGER_S + 0.1)
        assert wire.is_closed


@virtual
async def test_the_bodies_of_all_routes_have_the_same_timeout(model_folder: Path) -> None:
    """Fails if a route reads its body without a limit of time, as /abort_request did."""
    with serving(model_folder, api_key="k", lora_root=str(model_folder)) as api:
        for path in ("/v1/chat/completions", "/abort_request", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            wire = await api.ask(head_of(1000, path).replace(b"Host", b"X-Api-Key: k\r\nHost") + b'{"rid": ')
            await asyncio.sleep(TIMEOUT_S - 1)
            assert not wire.received, path
            await asyncio.sleep(2)
            assert wire.statuses == [408] and b"too slowly" in wire.received, path


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
async def test_a_slow_body_is_given_up(model_folder: Path) -> None:
    """Fails if a client that pauses, or sends a byte now and then, keeps the memory that it was promised, or a steady client is refused."""
    small, large, steady = body_of(large_image(100_000)), body_of(large_image(4_000_000)), body_of(large_image(2_000_000))
    with serving(model_folder) as api:

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
