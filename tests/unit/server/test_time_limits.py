"""How long a request may take, by the client's word or the operator's, and when one that was refused should come again."""

import time
from pathlib import Path
from typing import Any, cast

import pytest

from engine.messages import ErrorInfo, Event, Events
from engine.stats import EngineStats
from server.http import client as client_module
from server.http.client import Client
from tests.unit.server.stack import Stack

OVERLOADED = ErrorInfo(503, "full", "server_error", code="overloaded", retry_after=1)


def test_the_field_becomes_the_engines_deadline(stack: Stack) -> None:
    """Red if a client's timeout does not reach the scheduler, which keeps it, or counts from another moment than the body's end."""
    started = time.monotonic()
    assert stack.chat("x", timeout=5.5).status_code == 200
    deadline = stack.scheduler.requests[-1].deadline
    assert deadline is not None and started + 5.5 <= deadline < time.monotonic() + 5.5
    assert stack.chat("x").status_code == 200 and stack.scheduler.requests[-1].deadline is None
    for bad in (0, -1, "5", 1e9):
        assert stack.chat("x", timeout=bad).json()["error"]["param"] == "timeout"


def test_a_deadline_ends_the_preparation_too(stack: Stack) -> None:
    """Red if a request that is being prepared waits longer than its client."""
    started = time.monotonic()
    response = stack.chat("word " * 200_000, timeout=0.001)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert time.monotonic() - started < 3


def test_the_operators_limit_holds_for_all(model_folder: Path) -> None:
    """Red if a client may ask for more than it may have."""
    running = Stack(model_folder, request_timeout=20)
    try:
        for fields, expected in (({}, 20), ({"timeout": 100}, 20), ({"timeout": 3}, 3)):
            started = time.monotonic()
            running.chat("x", **fields)
            deadline = running.scheduler.requests[-1].deadline
            assert deadline is not None and started + expected <= deadline <= time.monotonic() + expected
    finally:
        running.close()


def test_retry_after_follows_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if everybody is told to come back in a second although minutes of work wait."""
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
