"""Who gets in, what probes are told, how long a request may take, and which seed it gets."""

import asyncio
import itertools
import json
import random
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.launch.flags import parse_args
from engine.wire.messages import ErrorInfo, Event, Events
from server.api.chat.endpoint import LARGE_JSON_BYTES
from server.api.chat.status import StatusRoutes
from server.api.http.registry import RequestRegistry
from server.errors import RequestError
from tests.unit.server.in_process import serving, settle, virtual
from tests.unit.server.raw_http import head_of, request_of, text_body
from tests.unit.server.stack import Stack


@virtual
async def test_each_of_several_keys_opens_and_nothing_else_does(model_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of clients\nfirst\n\n  sécond  \n")
    with serving(model_folder, api_key="own", api_key_file=str(file)) as api:
        for key in ("own", "first", "sécond"):
            for headers in ({"Authorization": f"bearer {key}".encode()}, {"x-api-key": key.encode()}):
                assert (await api.http.get("/v1/models", headers=headers)).status_code == 200, key
        for wrong in ("", "# of clients", "of clients", "firs", "own first", "own,first", "None"):
            response = await api.http.get("/v1/models", headers={"x-api-key": wrong})
            assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer"), wrong
        for path in ("/v1/models", "/metrics", "/version", "/v1/chat/completions", "/health/../v1/models", "/nowhere", "/HEALTH"):
            for headers in ({}, {"Authorization": ""}, {"Authorization": "Basic own"}):
                assert (await api.http.get(path, headers=headers)).status_code == 401, path
        page = await api.http.get("/")  # it asks for the key itself
        assert page.status_code == 200 and "needs an API key" in page.text and 'id="key"' in page.text
        assert "first" not in (await api.http.get("/server_info", headers={"x-api-key": "own"})).text


def test_a_file_without_a_key_stops_the_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys"
    for content, words in ((None, "there is no file"), ("# none\n\n", "there is no key")):
        if content is not None:
            file.write_text(content)
        with pytest.raises(SystemExit):
            parse_args(["--api-key-file", str(file)])
        assert f"--api-key-file: {words}" in capsys.readouterr().err


@virtual
async def test_names_of_the_server(model_folder: Path) -> None:
    with serving(model_folder, allowed_hosts="llm.example.org, *.inner.example, localhost") as api:
        for host in ("llm.example.org", "llm.example.org:8000", "a.inner.example", "localhost:1"):
            assert (await api.http.get("/v1/models", headers={"Host": host})).status_code == 200, host
        for host in (
            "evil.example", "llm.example.org.evil.example", "inner.example", "xinner.example", "127.0.0.1:8000", "localhost@evil.example",
        ):  # fmt: skip
            for path in ("/v1/models", "/", "/metrics", "/nowhere"):
                assert (await api.http.get(path, headers={"Host": host})).status_code == 400, host


def test_the_api_as_a_process(model_folder: Path) -> None:
    stack = Stack(model_folder, api_key="own")
    try:
        assert stack.http.get("/v1/models").status_code == 401
        assert stack.http.get("/v1/models", headers={"x-api-key": "own"}).status_code == 200
        for process in stack.processes.values():
            soft, hard = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert soft == hard
    finally:
        stack.close()


class Service:
    def __init__(self, max_requests: int = 8, is_started: bool = True):
        self.sent: list[Any] = []
        self.registry = RequestRegistry(SimpleNamespace(send=self.sent.append), None, max_requests)
        if is_started:
            self.registry.dispatch(Events([], [], None, time.monotonic()))


async def test_states_of_health() -> None:
    starting, service = Service(is_started=False), Service()

    async def check(service: Service, *expected: object) -> None:
        response = await StatusRoutes(cast(Any, service)).health()
        assert (response.status_code, json.loads(bytes(response.body))["status"]) == expected

    await check(starting, 503, "starting")
    with pytest.raises(RequestError) as refused:
        starting.registry.check_open()
    assert refused.value.info.status == 503
    for ready in (service, Service(max_requests=0)):  # a full queue is not a failure
        await check(ready, 200, "ok")
    service.registry.health.heartbeat = 1e-9
    await check(service, 503, "stalled")
    service.registry.refuse_new(ErrorInfo(503, "The server is shutting down.", code="shutting_down"))
    await check(service, 503, "stopping")


@virtual
async def test_the_field_and_the_flag_become_the_deadline(model_folder: Path) -> None:
    for limit, field, expected in ((None, None, None), (None, 5.5, 5.5), (20, None, 20), (20, 100, 20), (20, 3, 3)):
        with serving(model_folder, request_timeout=limit) as api:
            wire = await api.ask(*(request_of(text_body(timeout=value)) for value in (field, 0, -1, "5", 1e9)))
            assert wire.statuses == [200, 400, 400, 400, 400]
            assert all(json.loads(text)["error"]["param"] == "timeout" for _, text in wire.answers[1:])
            (submit,) = api.submits
            assert submit.deadline == (None if expected is None else submit.stages.received + expected)


@virtual
async def test_a_stream_without_chunks_sends_pings(model_folder: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}], [{"name": "f", "input_schema": {"type": "object"}}]
    cases = (("/v1/chat/completions", tools[0], b": ping\n\n"), ("/v1/messages", tools[1], b"event: ping\n"))
    with serving(model_folder) as api:
        for (path, tools_of_path, ping), has_tokens in itertools.product(cases, (True, False)):
            api.script = lambda api, submit: api.dispatch(Event(submit.rid, "a", 1, num_prompt_tokens=3))
            body = text_body(max_tokens=99, stream=True, tools=tools_of_path)
            wire = await api.ask(head_of(len(body), path) + body)
            for number in range(2, 27):
                await asyncio.sleep(1)
                if has_tokens:
                    api.dispatch(Event(api.submits[-1].rid, "", number))
            assert wire.received.count(ping) == 2
            api.dispatch(Event(api.submits[-1].rid, "b", 27, finish_reason="stop", num_prompt_tokens=3))
            await settle()
            assert wire.received.endswith(b"0\r\n\r\n") and wire.received.count(ping) == 2


def test_a_deadline_ends_the_preparation_too(stack: Stack) -> None:
    count = len(stack.scheduler.requests)
    response = stack.chat("word " * 200_000, timeout=0.001)
    assert (response.status_code, response.json()["error"]["code"]) == (504, "timeout")
    assert all(request.deadline is None for request in stack.scheduler.requests[count:])


@virtual
async def test_a_large_request_does_not_take_the_seed_of_a_later_one(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies are read in threads."""
    may_read, to_thread = asyncio.Event(), asyncio.to_thread

    async def wait_and_read(read: Any, *arguments: Any) -> Any:
        await may_read.wait()
        return await to_thread(read, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", wait_and_read)
    with serving(model_folder, seed=1) as api:
        wires = [await api.ask(request_of(text_body("x" * size))) for size in (LARGE_JSON_BYTES, 1)]
        may_read.set()
        await settle()
        assert [wire.statuses for wire in wires] == [[200], [200]]
    expected = random.Random(1)
    assert [submit.params.seed for submit in reversed(api.submits)] == [expected.getrandbits(63) for _ in range(2)]


@virtual
async def test_a_request_that_cannot_be_encoded_leaves_no_stream(model_folder: Path) -> None:
    """An open stream made every later drain wait for its full time."""
    with serving(model_folder) as api:
        ((status, error),) = (await api.ask(request_of(text_body(chat_template_kwargs={"x": 10**30})))).answers
        assert status == 400 and json.loads(error)["error"]["code"] == "invalid_value"
        assert not api.registry.num_streams and not api.registry.replies and not api.submits
