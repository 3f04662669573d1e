"""Bodies of requests: large ones, truncated ones and slow ones."""

import asyncio
import base64
from pathlib import Path

from server.api.http.connection import BODY_SECONDS, LINGER_S
from tests.unit.server.in_process import MIB, serving, settle, virtual
from tests.unit.server.raw_http import CHUNKED, JPEG, body_of, head_of, large_image, packets, request_of, text_body


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
    with serving(model_folder, api_key="k", lora_root=str(model_folder)) as api:
        for path in ("/v1/chat/completions", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
            wire = await api.ask(head_of(1000, path).replace(b"Host", b"X-Api-Key: k\r\nHost") + b'{"rid": ')
            await asyncio.sleep(2 * BODY_SECONDS - 1)
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


@virtual
async def test_a_slow_body_is_given_up(model_folder: Path) -> None:
    body = body_of(large_image(1_000_000))
    with serving(model_folder) as api:
        for num_sent, num_bytes, pause, seconds in (
            (0, 0, 1.0, BODY_SECONDS), (900_000, 0, 1.0, 2 * BODY_SECONDS), (0, 100_000, 20.0, None),
        ):  # fmt: skip
            wire = await api.ask(*packets(head_of(len(body)) + body[:num_sent]))
            loop = asyncio.get_running_loop()
            started = loop.time()
            while not wire.received and loop.time() - started < 1000:
                wire.send(body[num_sent : num_sent + num_bytes])
                num_sent += num_bytes
                await asyncio.sleep(pause)
            assert wire.statuses == [200 if seconds is None else 408], (num_sent, pause)
            assert seconds is None or seconds <= loop.time() - started < seconds + 2 * pause


@virtual
async def test_bodies_share_the_memory(model_folder: Path) -> None:
    with serving(model_folder) as api:
        without_length = [await api.ask(b"POST /v1/chat/completions" + CHUNKED + b"1\r\n{\r\n") for _ in range(100)]
        assert (await api.ask(*packets(request_of(body_of(large_image(4 * MIB)))))).statuses == [200]
        wires = [*without_length, await api.ask(head_of(9 * MIB) + b"{")]
        assert (await api.ask(head_of(9 * MIB))).statuses == [503]
        assert not any(wire.received for wire in wires)
        for wire in wires:
            wire.leave()
        await settle()
        ((status, error),) = (await api.ask(head_of(17 * MIB))).answers
        assert status == 413 and b"%d" % (16 * MIB) in error
