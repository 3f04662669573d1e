"""The real api and processor at their edges: clients that leave, bodies that break off, full memory, and the end of it all."""

import itertools
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.wire.messages import EngineRequest, RequestOutput
from engine.wire.stats import Stages
from server.api.chat.format import ChatFormat
from server.api.http.scan import Scanner
from server.processor.intake import Intake
from server.processor.text.output_text import OutputText
from tests.eventually import HANG_GUARD_S, eventually
from tests.unit.server.pictures import PLAIN, png_header
from tests.unit.server.raw_http import body_of, connect, head_of, text_body
from tests.unit.server.stack import MIB, FakeScheduler, Stack, answer_ids, hold, hold_silently
from tests.unit.server.test_stack import image, metrics_of, uri, user

HELLO = body_of(PLAIN["4:2:0"])


def error_of(response: httpx.Response) -> tuple[int, str | None]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert not re.search(r"/tmp|0x[0-9a-f]{6}|Traceback|127\.0", error["message"])
    return response.status_code, error["param"]


def sent(stack: Stack, body: bytes, length: int | None = None) -> socket.socket:
    client = connect(stack)
    client.sendall(head_of(len(body) if length is None else length) + body)
    return client


def test_a_client_that_leaves_aborts_its_request(stack: Stack) -> None:

    def num_responses() -> float:
        return sum(value for name, value in metrics_of(stack).items() if name.startswith("engine_responses_total"))

    for stream, has_token in itertools.product((False, True), repeat=2):
        stack.reset()
        stack.scheduler.script, count = hold if has_token else hold_silently, len(stack.scheduler.requests)
        client = sent(stack, body_of(PLAIN["4:2:0"], stream=stream))
        eventually(lambda count=count: len(stack.scheduler.requests) > count)
        if stream and has_token:
            assert b"200 OK" in client.recv(1000)
        expected = num_responses() + (not (stream and has_token))  # that one was counted when its headers went out
        client.close()
        eventually(lambda: stack.scheduler.aborted == [stack.last.rid], f"the abort: {stream=} {has_token=}")
        eventually(lambda expected=expected: num_responses() == expected, "the count")


def test_a_client_that_leaves_while_its_image_loads(stack: Stack) -> None:
    processor, may_go_on = stack.local.processor, threading.Event()
    for _ in range(stack.config.media_pool_size):
        processor._sources.pool.submit(may_go_on.wait)
    count = len(stack.scheduler.requests)
    try:
        client = sent(stack, HELLO)
        eventually(lambda: processor._intake.requests, "the request in the processor")
        client.close()
        eventually(lambda: not processor._intake.requests, "its abort")
    finally:
        may_go_on.set()
    stack.settle()
    assert len(stack.scheduler.requests) == count


# One of each status and of each place that refuses. test_image has the bad files, test_schema the bad fields.
BAD_REQUESTS: list[tuple[bytes, int, str | None]] = [
    (body_of(PLAIN["4:2:0"][:500]), 422, "messages"), (body_of(png_header(13_000, 13_000)), 400, "messages"), (b"{", 400, None),
    (body_of(PLAIN["1x1"], b"bad"), 422, "messages"), (body_of(*[PLAIN["1x1"]] * 129), 400, "messages"),
    (text_body(model="another"), 404, "model"), (text_body(temperature=float("nan")), 400, "temperature"),
    (json.dumps({"messages": user([image("http://127.0.0.1:1/x.png")])}).encode(), 400, "messages"),
]  # fmt: skip


def test_bad_requests(stack: Stack) -> None:
    for i, (body, status, param) in enumerate(BAD_REQUESTS):
        assert error_of(stack.http.post("/v1/chat/completions", content=body)) == (status, param), f"request {i}"


def test_the_prompt_must_fit_the_context(stack: Stack) -> None:
    stack.chat("a")
    overhead = stack.last.prompt.length // 4 - 1
    assert stack.chat((" a" * (4095 - overhead)).lstrip()).status_code == 200
    response = stack.chat((" a" * (4096 - overhead)).lstrip())
    assert response.status_code == 400 and response.json()["error"]["message"].count("4096") == 2


def test_bodies_that_never_fit(stack: Stack) -> None:
    for length in (17 * MIB, 1 << 40):
        with sent(stack, b"", length=length) as client:
            assert b" 413 " in client.recv(1000).split(b"\r\n")[0]
    pieces = (b'{"x":"data:a/b;base64,' if i == 0 else b"A" * MIB for i in range(18))
    for content in (text_body("x" * (9 * MIB)), pieces, text_body(metadata={"icon": uri(b"\xff" * (7 * MIB))})):
        assert error_of(stack.http.post("/v1/chat/completions", content=content)) == (413, None)
    assert stack.chat("x", metadata={"icon": uri(PLAIN["1x1"])}).status_code == 200


def test_a_slow_reader_loses_nothing(stack: Stack) -> None:
    stack.script = answer_ids([65 + i % 26 for i in range(3000)])
    with stack.http.stream("POST", "/v1/chat/completions", content=text_body(stream=True)) as response:
        stack.settle()  # all tokens have come
        assert response.read().count(b'"content":') == 3001


def test_the_event_loop_runs_between_pieces_of_a_large_body(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, pieces, feed = 0, [], Scanner.feed

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if not done.is_set():
            stack.local.loop.call_soon(tick)

    def record(scanner: Scanner, chunk: bytes) -> None:
        pieces.append((len(chunk), ticks))
        feed(scanner, chunk)

    done = threading.Event()
    monkeypatch.setattr(Scanner, "feed", record)
    stack.local.loop.call_soon_threadsafe(tick)
    body = body_of(b"\xff" * (10 * MIB))
    assert stack.http.post("/v1/chat/completions", content=body).status_code == 422
    done.set()
    sizes, times = zip(*pieces, strict=True)
    assert sum(sizes) == len(body) and max(sizes) <= MIB and len(set(times)) == len(times)


@pytest.mark.faults
@pytest.mark.parametrize("ending", ["signal", pytest.param("orphan", marks=pytest.mark.gate)])
def test_every_waiting_client_gets_an_error_at_the_end(model_folder: Path, ending: str) -> None:
    stack = Stack(model_folder)
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, stream: bool) -> None:
        answers[name] = httpx.post(
            f"{stack.url}/v1/chat/completions", json=json.loads(text_body(name, stream=stream)), timeout=HANG_GUARD_S
        )

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        (hold if len(scheduler.requests) == 1 else hold_silently)(scheduler, request)

    stack.script = script
    threads = []
    for i, (name, stream) in enumerate((("streaming", True), ("silent stream", True), ("document", False))):
        threads.append(threading.Thread(target=ask, args=(name, stream)))
        threads[-1].start()
        eventually(lambda count=i + 1: len(stack.scheduler.requests) == count)
    sender = sent(stack, b'{"messages": [', length=10 * MIB)
    large = b"x" * (7 * MIB)  # has no space once the sender has
    eventually(lambda: stack.http.post("/v1/chat/completions", content=large).status_code == 503, "the body arrives")
    stack.settle()
    if ending == "signal":
        stack.processes["api"].send_signal(signal.SIGTERM)
    else:
        stack.orphan()
    answer = b"".join(iter(lambda: sender.recv(10_000), b""))  # to its end: head and body may come apart
    assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in answer and b"retry-after" in answer.lower()
    for thread in threads:
        thread.join(HANG_GUARD_S)
    assert stack.processes["api"].wait(HANG_GUARD_S) == 0
    assert answers["streaming"].status_code == 200
    assert json.loads(answers["streaming"].text.strip().split("\n\n")[-1][6:])["error"]["code"] == "shutting_down"
    for name in ("silent stream", "document"):
        assert (answers[name].status_code, answers[name].json()["error"]["code"]) == (503, "shutting_down")
    if ending == "orphan":
        assert stack.processes["processor"].wait(HANG_GUARD_S) == 0
        assert not os.path.exists(stack.run_dir)
    sender.close()
    stack.close()


def test_a_lost_region_is_a_loud_death(model_folder: Path) -> None:
    stack = Stack(model_folder, in_process=True)
    stack.scheduler.send([RequestOutput(7, [1], None, None, 0, Stages())], [7])
    with pytest.raises(AssertionError, match="a server failed"):
        eventually(lambda: stack.servers.check())
    stack.close()


def test_an_exception_ends_its_request_only(
    stack: Stack, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bad = 1 << 20

    def fail(cls: type, method: str, is_bad: Callable[..., bool]) -> None:
        original = getattr(cls, method)

        def call(self: Any, *given: Any, **named: Any) -> Any:
            if is_bad(*given):
                raise KeyError("a fault")
            return original(self, *given, **named)

        monkeypatch.setattr(cls, method, call)

    def script(scheduler: FakeScheduler, request: EngineRequest) -> None:
        scheduler.held.add(request.rid)
        for tokens in ([65], [{7: bad, 8: 68}.get(request.params.max_tokens or 0, 66)]):
            scheduler.send([RequestOutput(request.rid, tokens, stages=Stages())], [])
        if request.params.max_tokens == 9:
            scheduler.send([RequestOutput(request.rid, [67], "stop")], [request.rid])

    def num_failed() -> float:
        return metrics_of(stack).get('engine_refused_requests_total{reason="internal_error"}', 0)

    fail(OutputText, "push", lambda token_id, *_: token_id == bad)
    fail(Intake, "_answers", lambda submit: submit.params.max_tokens == 6)
    fail(ChatFormat, "token_chunk", lambda choice, event, extra: choice.usage.num_generated == 2 and event.text == tokenizer.decode([68]))
    stack.script, before = script, num_failed()
    for number, (limit, stream) in enumerate(((7, False), (7, True), (6, False), (6, True), (8, True)), 1):
        answer = stack.chat("x", max_tokens=limit, stream=stream)
        is_late = stream and limit > 6
        assert answer.status_code == (200 if is_late else 500)
        error = json.loads(answer.text.strip().split("\n")[-1].removeprefix("data: "))["error"] if is_late else answer.json()["error"]
        assert error["code"] == "internal_error" and num_failed() == before + number
        assert stack.chat("x", max_tokens=9).status_code == 200
    eventually(lambda: len(stack.scheduler.aborted) == 3, "those that reached the scheduler are aborted")
    assert sum("a fault" in (record.exc_text or str(record.exc_info)) for record in caplog.records) == 5


def test_large_prompts_wait_for_each_other(stack: Stack) -> None:
    text = "word " * 100_000
    for client in [sent(stack, text_body(text)) for _ in range(4)]:
        client.close()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: stack.chat(text), range(6)))
    assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
