"""What probes are told, and how loudly: a busy server is healthy, one that stops says so, and polls do not fill the log."""

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, Response

from engine.messages import ErrorInfo, Event, Events, Submit
from server.api.sglang.endpoint import Native
from server.api.status import Status
from server.errors import RequestError
from server.http.client import Client
from server.http.log import POLLS, RequestLog
from tests.eventually import eventually_async


class Service:
    """What the endpoints under test need of a server."""

    def __init__(self, max_requests: int = 8, is_started: bool = True):
        self.sent: list[Any] = []
        self.client = Client(SimpleNamespace(send=self.sent.append), None, max_requests)
        if is_started:
            self.client.dispatch(Events([], [], None, time.monotonic()))

    def probe(self) -> "asyncio.Task[Any]":
        return asyncio.create_task(Native(self).health_generate())

    def dispatch(self, event: Event) -> None:
        self.client.dispatch(Events([event], [], None, 0.0))


async def test_states_of_health() -> None:
    """A server that drained said that it was stalled."""
    starting, service = Service(is_started=False), Service()

    async def check(service: Service, *expected: object, is_compiling: bool = False) -> None:
        response = Response()
        answer = await Status(service, lambda: is_compiling).health(response)
        assert (response.status_code, answer["status"]) == expected

    await check(starting, 503, "starting")
    await check(starting, 503, "compiling", is_compiling=True)
    await check(service, 200, "ok")
    service.client.health.heartbeat = 1e-9
    await check(service, 503, "stalled")
    service.client.refuse_new(ErrorInfo(503, "The server is shutting down.", code="shutting_down"))
    await check(service, 503, "stopping")


async def test_a_full_queue_is_no_failure_and_an_idle_engine_is_asked() -> None:
    """A liveness probe would have restarted a busy server."""
    full, idle = Service(max_requests=0), Service()
    probe = full.probe()
    await eventually_async(lambda: full.client._token._waiters, "the probe waits")
    full.dispatch(Event(7, "a", 1))
    assert await probe == {"status": "ok"} and not full.sent
    probe = idle.probe()
    await eventually_async(lambda: idle.sent, "a request")
    (submit,) = idle.sent
    assert isinstance(submit, Submit) and submit.params.max_tokens == 1
    idle.dispatch(Event(submit.rid, "a", 1, finish_reason="length"))
    assert await probe == {"status": "ok"} and not idle.client.num_streams and not idle.client.replies


async def test_an_engine_without_tokens_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events without a token, such as the end of a request that was only counted, prove nothing."""
    monkeypatch.setattr("server.api.sglang.endpoint.HEALTH_S", 0.0)
    for service in (Service(), Service(max_requests=0), Service(is_started=False)):
        probe = service.probe()
        service.dispatch(Event(7, "text", finish_reason="stop"))
        with pytest.raises(RequestError) as caught:
            await probe
        assert caught.value.info.status == 503 and not service.client.num_streams


async def test_polls_are_logged_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "server.http.log")

    async def ignore(message: Any) -> None:
        pass

    for status in (200, 503):
        caplog.clear()
        for path in (*POLLS, "/v1/models"):
            scope = {"type": "http", "method": "GET", "path": path, "headers": [], "root_path": ""}
            await RequestLog(PlainTextResponse("", status), is_silent=False)(scope, ignore, ignore)
        levels = {record.getMessage().split("'")[1]: record.levelno for record in caplog.records}
        assert levels == {path: logging.DEBUG for path in POLLS} | {"/v1/models": logging.INFO}
    assert {"/health", "/health/live", "/health_generate", "/ping", "/metrics"} == POLLS
