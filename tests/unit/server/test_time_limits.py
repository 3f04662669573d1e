"""How long a request may take, when a refused one should be repeated, and which seed it gets."""

import asyncio
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.messages import ErrorInfo, Event, Events
from engine.stats import EngineStats
from server.api.endpoint import LARGE_JSON_BYTES, Endpoint, Job
from server.http import client as client_module
from server.http.client import Client
from tests.unit.server.in_process import serving, virtual
from tests.unit.server.stack import Stack

OVERLOADED = ErrorInfo(503, "full", "server_error", code="overloaded", retry_after=1)


@virtual
async def test_the_field_and_the_flag_become_the_deadline(model_folder: Path) -> None:
    """It counts from the body's end."""
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


class Probe(Endpoint):
    """Keeps the seeds of its requests; large bodies are read in a thread that waits for `may_read`."""

    def __init__(self, service: Any) -> None:
        super().__init__(service)
        self.may_read = threading.Event()
        self.seeds: dict[str, int] = {}

    def read(self, value: dict[str, Any], body: Any) -> Job:
        if value["is_large"]:
            assert self.may_read.wait(60)
        self.seeds[value["name"]] = body.seed
        return Job(SimpleNamespace(model=None, timeout=None), [SimpleNamespace(media=[], cache_salt="", body=None)])

    def reply(self, stream: Any, job: Job, body: Any) -> Any:
        raise NotImplementedError


def body_of(name: str, is_large: bool) -> Any:
    padding = "x" * (LARGE_JSON_BYTES if is_large else 0)
    document = f'{{"name": "{name}", "is_large": {str(is_large).lower()}, "padding": "{padding}"}}'.encode()
    scanner = SimpleNamespace(json=lambda payloads: document, references=[])
    return SimpleNamespace(scanner=scanner, payloads=b"", client=b"", num_announced=0, give_up=lambda: None, received=0.0)


async def test_a_large_request_does_not_take_the_seed_of_a_later_one() -> None:
    """A large body is read in a thread, and a small one that came later took its seed."""
    config = SimpleNamespace(max_images_per_request=1, api_key=None, api_key_file=None, request_timeout=None)
    client = SimpleNamespace(submit=lambda submits: None)
    service = SimpleNamespace(config=config, model_names=(), seeds=random.Random(1), client=client)
    probe = Probe(service)
    first = asyncio.create_task(probe.submit(body_of("first", is_large=True)))
    await asyncio.sleep(0)
    await probe.submit(body_of("second", is_large=False))
    probe.may_read.set()
    await first
    expected = random.Random(1)
    assert [probe.seeds[name] for name in ("first", "second")] == [expected.getrandbits(63) for _ in range(2)]
