"""How long a request may take, by the client's or the operator's limit, and when a refused one should be repeated."""

from pathlib import Path
from typing import Any, cast

import pytest

from engine.messages import ErrorInfo, Event, Events
from engine.stats import EngineStats
from server.http import client as client_module
from server.http.client import Client
from tests.unit.server.in_process import serving, virtual
from tests.unit.server.stack import Stack

OVERLOADED = ErrorInfo(503, "full", "server_error", code="overloaded", retry_after=1)


@virtual
async def test_the_field_and_the_flag_become_the_deadline(model_folder: Path) -> None:
    """Fails if a client's timeout does not reach the scheduler, if it counts from another moment than the body's end, or if a client may
    ask for more than the operator allows."""
    for limit, field, expected in ((None, None, None), (None, 5.5, 5.5), (20, None, 20), (20, 100, 20), (20, 3, 3)):
        with serving(model_folder, request_timeout=limit) as api:
            body = {"messages": [{"role": "user", "content": "x"}], **({} if field is None else {"timeout": field})}
            assert (await api.http.post("/v1/chat/completions", json=body)).status_code == 200
            (submit,) = api.submits
            assert submit.deadline == (None if expected is None else submit.stages.received + expected)
            for bad in (0, -1, "5", 1e9):
                refused = await api.http.post("/v1/chat/completions", json={**body, "timeout": bad})
                assert refused.json()["error"]["param"] == "timeout", bad


def test_a_deadline_ends_the_preparation_too(stack: Stack) -> None:
    count = len(stack.scheduler.requests)
    response = stack.chat("word " * 200_000, timeout=0.001)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert all(request.deadline is None for request in stack.scheduler.requests[count:])


def test_retry_after_follows_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(cast(Any, None), cast(Any, None), 10)
    now = 100.0
    monkeypatch.setattr(client_module.time, "monotonic", lambda: now)
    assert client.advise(OVERLOADED).retry_after == 1  # nothing is known
    for _ in range(10):
        client.dispatch(Events([Event(1, finish_reason="stop")]))
        now += 0.5
    for num_waiting, seconds in ((0, 1), (1, 1), (20, 10), (100, 50), (1000, 60)):
        client.stats = EngineStats(num_waiting=num_waiting)
        assert client.advise(OVERLOADED).retry_after == seconds
    assert client.advise(ErrorInfo(503, "", code="shutting_down", retry_after=5)).retry_after == 5
