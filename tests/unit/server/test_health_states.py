"""What probes are told, and how loudly: a busy server is healthy, one that stops says so, and polls do not fill the log."""

import asyncio
import logging
import time
from typing import Any

import pytest
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from engine.messages import ErrorInfo, Event, Events, Submit
from server.api.sglang.endpoint import Native
from server.api.status import Status
from server.errors import RequestError
from server.http.client import Client
from server.http.log import POLLS, RequestLog
from tests.eventually import eventually_async

STOPPING = ErrorInfo(503, "The server is shutting down.", code="shutting_down")


class Outbox:
    """Keeps what is sent to the processor."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Service:
    """What the endpoints under test need of a server."""

    def __init__(self, max_requests: int = 8, is_started: bool = True):
        self.outbox = Outbox()
        self.client = Client(self.outbox, None, max_requests)  # type: ignore[arg-type]
        if is_started:
            self.client.dispatch(Events([], [], None, time.monotonic()))

    def probe(self) -> "asyncio.Task[Any]":
        return asyncio.create_task(Native(self).health_generate())  # type: ignore[arg-type]


async def health_of(service: Service, is_compiling: bool = False) -> tuple[int, str]:
    response = Response()
    answer = await Status(service, lambda: is_compiling).health(response)  # type: ignore[arg-type]
    return response.status_code, answer["status"]


async def test_states_of_health() -> None:
    """A server that drained said that it was stalled."""
    service = Service(is_started=False)
    assert await health_of(service) == (503, "starting")
    assert await health_of(service, is_compiling=True) == (503, "compiling")
    service = Service()
    assert await health_of(service) == (200, "ok")
    service.client.health.heartbeat = 1e-9
    assert await health_of(service) == (503, "stalled")
    service.client.refuse_new(STOPPING)
    assert await health_of(service) == (503, "stopping")


async def test_a_full_queue_is_no_failure() -> None:
    """`/health_generate` was 503 when the queue was full: a liveness probe would have restarted a busy server."""
    service = Service(max_requests=0)
    probe = service.probe()
    await eventually_async(lambda: service.client._token._waiters, "the probe waits")
    service.client.dispatch(Events([Event(7, "a", 1)], [], None, 0.0))
    assert await probe == {"status": "ok"}
    assert not service.outbox.sent


async def test_an_idle_engine_is_asked_for_a_token() -> None:
    service = Service()
    probe = service.probe()
    await eventually_async(lambda: service.outbox.sent, "a request")
    (submit,) = service.outbox.sent
    assert isinstance(submit, Submit) and submit.params.max_tokens == 1
    service.client.dispatch(Events([Event(submit.rid, "a", 1, finish_reason="length")], [], None, 0.0))
    assert await probe == {"status": "ok"}
    assert not service.client.num_streams and not service.client.replies


async def test_an_engine_without_tokens_is_stalled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events without a token, such as the end of a request that was only counted, prove nothing."""
    monkeypatch.setattr("server.api.sglang.endpoint.HEALTH_S", 0.0)
    for service in (Service(), Service(max_requests=0), Service(is_started=False)):
        probe = service.probe()
        service.client.dispatch(Events([Event(7, "text", finish_reason="stop")], [], None, 0.0))
        with pytest.raises(RequestError) as caught:
            await probe
        assert caught.value.info.status == 503 and not service.client.num_streams


@pytest.mark.parametrize("status", [200, 503])
async def test_polls_are_logged_at_debug(caplog: pytest.LogCaptureFixture, status: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse("", status)(scope, receive, send)

    async def ignore(message: Any) -> None:
        pass

    caplog.set_level(logging.DEBUG, "server.http.log")
    for path in sorted({*POLLS, "/v1/models"}):
        scope = {"type": "http", "method": "GET", "path": path, "headers": [], "root_path": ""}
        await RequestLog(app, is_silent=False)(scope, ignore, ignore)  # type: ignore[arg-type]
    levels = {record.getMessage().split("'")[1]: record.levelno for record in caplog.records}
    assert levels == {path: logging.DEBUG for path in POLLS} | {"/v1/models": logging.INFO}
    assert {"/health", "/health/live", "/health_generate", "/ping", "/metrics"} == POLLS
