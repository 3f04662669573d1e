"""Counting right answers of a server: the bench's client against a stand-in, and Wilson's interval."""

import json
from itertools import islice

import pytest
from aiohttp import web

from bench.accuracy import ask_server, report
from models.demo.questions import questions
from models.demo.score import Score
from tests.unit.bench.test_client import client_of, stream


async def test_a_server_is_asked_and_counted() -> None:
    """The server knows the answers, but answers "7" to the second question and fails the third."""
    items = list(islice(questions(3, ("colour", "shape")), 8))
    known = {json.dumps(item.messages()): i for i, item in enumerate(items)}

    async def chat(request: web.Request) -> web.StreamResponse:
        index = known[json.dumps((await request.json())["messages"])]
        if index == 2:
            return web.Response(status=503, text="busy")
        chunk = {"choices": [{"delta": {"content": "7" if index == 1 else items[index].answer}}]}
        return await stream(request, f"data: {json.dumps(chunk)}\n\n".encode())

    async with client_of(chat) as client:
        results = await ask_server(client, "demo", items, concurrency=4)
    assert [result.seed for result in results] == [item.seed for item in items]
    assert [result.right for result in results] == [True, False, False] + [True] * 5
    summary = report(results)
    assert summary["errors"] == 1
    assert [row["right"] for row in summary["scores"]] == [3, 3, 6]


def test_wilson_interval() -> None:
    low, high = Score("x", 81, 263).interval
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=2e-4)
    assert Score("x", 10, 10).interval[1] == pytest.approx(1.0)
    assert Score("x", 0, 10).interval[0] == pytest.approx(0.0)
