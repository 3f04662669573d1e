"""The search for the highest rate, and what counts as a miss."""

import argparse
import asyncio

import pytest
from aiohttp import web

from bench.client import Answer
from bench.goodput import FEWEST_TOKENS, MOST_TOKENS, WORKLOADS, Point, conversations, measure_point, misses, search
from tests.unit.bench.test_client import Handler, client_of, stream

CHUNK = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'


@pytest.mark.parametrize("capacity", [0.3, 4.0, 5.0, 100.0])
def test_the_highest_rate_that_holds_is_found(capacity: float) -> None:
    async def measure(rate: float) -> Point:
        return Point(rate, 1, {"ttft": 0.0 if rate <= capacity else 0.02})

    points = asyncio.run(search(measure, 4.0, 0.05))
    best = max(point.rate for point in points if point.holds)
    assert best <= capacity <= best * 1.05 and len(points) < 16


def test_a_server_that_keeps_no_limit_has_no_goodput() -> None:
    async def measure(rate: float) -> Point:
        return Point(rate, 1, {"ttft": 1.0})

    with pytest.raises(SystemExit):
        asyncio.run(search(measure, 4.0, 0.05))


def test_errors_and_late_tokens_are_misses() -> None:
    prompt, late = Answer(token_times=[0.5, 0.55, 0.6]), Answer(token_times=[2.0, 2.05, 2.25])
    answers = [prompt, late, Answer(error="503")]
    assert misses(answers, {"ttft": 1.0, "itl": 0.1}) == {"ttft": 2 / 3, "itl": 2 / 5}
    assert misses([prompt], {"ttft": 1.0, "itl": 0.1}) == {"ttft": 0.0, "itl": 0.0}


def measured(handler: Handler, workload: str, duration: float, rate: float) -> Point:
    async def run() -> Point:
        async with client_of(handler) as client:
            return await measure_point(argparse.Namespace(workload=workload, duration=duration, timeout=30.0), client, "m", rate, 0)

    return asyncio.run(run())


def test_conversations_resend_their_pictures_and_errors_end_them() -> None:
    sizes = []

    async def chat(request: web.Request) -> web.StreamResponse:
        messages = (await request.json())["messages"]
        sizes.append(sum(part["type"] == "image_url" for each in messages if each["role"] == "user" for part in each["content"]))
        return web.Response(status=503) if sizes[-1] == 3 else await stream(request, CHUNK)

    point = measured(chat, "chat", 0.0, 1.0)
    assert sizes == [1, 2, 3] and point.requests == 6 and point.missed["ttft"] == 4 / 6


def test_a_point_has_its_rate_unless_too_many_are_late(monkeypatch: pytest.MonkeyPatch) -> None:
    status = 200

    async def chat(request: web.Request) -> web.StreamResponse:
        return await stream(request, CHUNK) if status == 200 else web.Response(status=status)

    monkeypatch.setattr("bench.goodput.make_uris", lambda *_: [])
    assert measured(chat, "catalogue", 0.5, 40.0).requests == 20
    status = 503
    assert 50 < measured(chat, "image", 30.0, 200.0).requests < 3000


def test_texts_of_the_catalogue_vary_within_their_bounds() -> None:
    talks, others = (conversations(WORKLOADS["catalogue"], 20, seed, [" a"]) for seed in (0, 1))
    lengths = [len(message["content"][1]["text"]) // 2 for (message,) in talks]
    assert FEWEST_TOKENS <= min(lengths) < 4100 < max(lengths) <= MOST_TOKENS and talks != others
