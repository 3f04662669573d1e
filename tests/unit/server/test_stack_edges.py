"""The real api and processor at their edges: clients that leave, bodies that break off, full memory, wrong keys, and the end of it all."""

import itertools
import json
import os
import re
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from PIL import Image

from engine.ipc import COMPILING
from engine.messages import (
    RequestOutput,
)
from engine.stats import Stages
from server.http.scan import Scanner
from tests.eventually import HANG_GUARD_S, eventually
from tests.unit.server.pictures import PLAIN, png_header, save
from tests.unit.server.stack import MIB, FakeScheduler, Stack, answer_ids, hold, hold_silently
from tests.unit.server.test_stack import image, uri


def error_of(response: httpx.Response) -> tuple[int, str | None]:
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert not re.search(r"/tmp|0x[0-9a-f]{6}|Traceback|127\.0", error["message"])
    return response.status_code, error["param"]


class RawClient:
    """A socket that speaks just enough HTTP to break off anywhere."""

    def __init__(self, stack: Stack):
        host, port = stack.url.removeprefix("http://").split(":")
        self.socket = socket.create_connection((host, int(port)))

    def send(self, body: bytes, length: int | None = None) -> None:
        size = len(body) if length is None else length
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
        self.socket.sendall(head.encode() + body)

    def leave(self) -> None:
        self.socket.close()


def hello(stream: bool) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": [image(uri(PLAIN["4:2:0"]))]}], "stream": stream}).encode()


def test_a_client_that_leaves_aborts_its_request(stack: Stack) -> None:
    """Red if the engine works on for a client that is gone, before or after the first token, streamed or not."""
    for stream, has_token in itertools.product((False, True), repeat=2):
        stack.reset()
        stack.scheduler.script = hold if has_token else hold_silently
        client, count = RawClient(stack), len(stack.scheduler.requests)
        client.send(hello(stream))
        eventually(lambda count=count: len(stack.scheduler.requests) > count)  # type: ignore[misc]
        if stream and has_token:
            assert b"200 OK" in client.socket.recv(1000)
        before = num_responses(stack)
        client.leave()
        rid = stack.scheduler.requests[-1].rid
        eventually(lambda rid=rid: stack.scheduler.aborted == [rid], f"the abort: {stream=} {has_token=}")  # type: ignore[misc]
        was_counted = stream and has_token  # when its headers went out
        expected = before + (not was_counted)
        eventually(lambda expected=expected: num_responses(stack) == expected, "the count")  # type: ignore[misc]


def num_responses(stack: Stack) -> float:
    """Chat responses of any status that the metrics have counted."""
    lines = [line for line in stack.http.get("/metrics").text.split("\n") if line.startswith("engine_responses_total")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_client_that_leaves_while_its_image_loads(stack: Stack) -> None:
    """Red if an abort during the preparation is lost, or if the request still reaches the scheduler."""
    processor, may_go_on = stack.local.processor, threading.Event()
    for _ in range(stack.config.media_pool_size):
        processor._tools.media_pool.submit(may_go_on.wait)
    count, client = len(stack.scheduler.requests), RawClient(stack)
    try:
        client.send(hello(False))
        eventually(lambda: processor._intake.requests, "the request in the processor")
        client.leave()
        eventually(lambda: not processor._intake.requests, "its abort")
    finally:
        may_go_on.set()
    stack.settle()
    assert len(stack.scheduler.requests) == count


def test_a_body_cut_mid_image(stack: Stack) -> None:
    """Red if the memory of a body that broke off is not freed (fixture)."""
    body = hello(False)
    for share in (0.0, 0.3, 0.9):
        client = RawClient(stack)
        client.send(body[: int(len(body) * share)], length=len(body))
        eventually(lambda: stack.local.api.client.num_reading == 1, "the body arrives")
        client.leave()
        eventually(lambda: stack.local.api.client.num_reading == 0, "the body is given up")


def of_image(url: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [image(url)]}]}


# One of each status and of each place that refuses. test_image and test_media_corpus have the bad files, test_schema the bad fields.
BAD_REQUESTS: list[tuple[dict[str, object], int, str | None]] = [
    (of_image(uri(PLAIN["4:2:0"][:500])), 422, "messages"),
    (of_image(uri(png_header(13_000, 13_000))), 413, None),
    (of_image("http://127.0.0.1:1/x.png"), 400, "messages"),
    (of_image("gopher://x"), 400, "messages[0].content[0].image_url.url"),
    ({"messages": [{"role": "user", "content": [image(uri(PLAIN["1x1"]))] * 129}]}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [image(uri(PLAIN["1x1"])), image(uri(b"bad"))]}]}, 422, "messages"),
    ({"messages": [{"role": "user", "content": "x"}], "temperature": float("nan")}, 400, "temperature"),
    ({"messages": [{"role": "user", "content": "x"}], "model": "another"}, 404, "model"),
    ({"messages": [{"role": "user", "content": "x"}] * 10_001}, 400, "messages"),
]


def test_bad_requests(stack: Stack) -> None:
    """Red if bad input is anything but a clean 4xx, or if a good request is not answered afterwards (fixture)."""
    for i, (body, status, param) in enumerate(BAD_REQUESTS):
        response = stack.http.post("/v1/chat/completions", content=json.dumps(body).encode())
        assert error_of(response) == (status, param), f"request {i}"


def test_bad_json(stack: Stack) -> None:
    """Red if a body that is no JSON is anything but a 400."""
    nested = b'{"messages":' + b"[" * 1000 + b"]" * 1000 + b"}"
    for body in (b"", b"{", b"[" * 100_000, nested, b'{"x":"data:a/b;base64,QUJD'):
        assert error_of(stack.http.post("/v1/chat/completions", content=body)) == (400, None), body[:20]


def test_the_prompt_must_fit_the_context(stack: Stack) -> None:
    """Red if the limit is off by one, or if the refusal does not say both numbers."""
    stack.chat("a")
    overhead = stack.scheduler.requests[-1].prompt.length // 4 - 1
    fitting, too_long = " a" * (4095 - overhead), " a" * (4096 - overhead)
    assert stack.chat(fitting.lstrip()).status_code == 200
    assert stack.scheduler.requests[-1].params.max_tokens == 1
    response = stack.chat(too_long.lstrip())
    assert response.status_code == 400
    assert response.json()["error"]["message"].count("4096") == 2


def test_bodies_that_never_fit(stack: Stack) -> None:
    """Red if a body larger than the arena or the limit is read instead of refused, or if text without end is."""
    client = RawClient(stack)
    client.send(b"", length=17 * MIB)
    assert b" 413 " in client.socket.recv(1000).split(b"\r\n")[0]
    client.leave()
    client = RawClient(stack)
    client.send(b"", length=1 << 40)
    assert b" 413 " in client.socket.recv(1000).split(b"\r\n")[0]
    client.leave()
    text = json.dumps({"messages": [{"role": "user", "content": "x" * (9 * MIB)}]}).encode()
    assert error_of(stack.http.post("/v1/chat/completions", content=text)) == (413, None)
    pieces = (b'{"x":"data:a/b;base64,' if i == 0 else b"A" * MIB for i in range(18))
    assert error_of(stack.http.post("/v1/chat/completions", content=pieces)) == (413, None)


def test_a_full_body_arena_is_503_with_retry_after(stack: Stack) -> None:
    """Red if lack of room right now is refused for good, or waited for."""
    waiting = RawClient(stack)
    waiting.send(b"{", length=13 * MIB)
    eventually(lambda: stack.local.api.client.num_reading == 1, "the body arrives")
    response = stack.http.post("/v1/chat/completions", content=b" " * (2 * MIB))
    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    waiting.leave()
    eventually(lambda: stack.local.api.client.num_reading == 0, "the body is given up")


def test_a_full_media_arena_is_503_with_retry_after(stack: Stack) -> None:
    """Red if images that do not fit now crash the processor or are refused for good, or if those that never fit are to come again."""
    files = [save(Image.new("RGB", (2000, 2000), (i, 0, 0)), "PNG") for i in range(7)]  # 12 MB of pixels each
    # Not files of below: those that are decoded before the refusal are known, and need no room when they come again.
    response = stack.chat([image(uri(data, "image/png")) for data in files[3:]])
    assert (response.status_code, "retry-after" in response.headers) == (413, False)
    stack.scheduler.script = hold_silently
    client, count = RawClient(stack), len(stack.scheduler.requests)
    client.send(json.dumps({"messages": [{"role": "user", "content": [image(uri(data, "image/png")) for data in files[:1]]}]}).encode())
    eventually(lambda: len(stack.scheduler.requests) > count)
    response = stack.chat([image(uri(data, "image/png")) for data in files[1:3]])
    assert response.status_code == 503 and int(response.headers["retry-after"]) >= 1
    client.leave()
    eventually(lambda: len(stack.scheduler.aborted) == 1)


def test_a_slow_reader_loses_nothing(stack: Stack) -> None:
    """Red if chunks are dropped or reordered for a client that reads later than tokens come."""
    stack.scheduler.script = answer_ids([65 + i % 26 for i in range(3000)])
    with stack.http.stream(
        "POST", "/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "stream": True}
    ) as response:
        stack.settle()  # all tokens have come
        assert response.read().count(b'"content":') == 3001


def test_the_event_loop_runs_between_pieces_of_a_large_body(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a large body is scanned at once, or if its pieces follow each other without a turn of others."""
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
    body = json.dumps({"messages": [{"role": "user", "content": [image(uri(b"\xff" * (10 * MIB)))]}]}).encode()
    assert stack.http.post("/v1/chat/completions", content=body).status_code == 422
    done.set()
    sizes, times = zip(*pieces, strict=True)
    assert sum(sizes) == len(body) and max(sizes) <= MIB and len(set(times)) == len(times)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def test_health_tells_starting_and_stalled_from_healthy(model_folder: Path) -> None:
    """Red if `/health` is 200 before the engine lives or while it is wedged, or if a request is taken before it can be served."""
    stack = Stack(model_folder, is_started=False, in_process=True, port=free_port())
    try:
        eventually(lambda: _is_open(stack.config.port))
        assert (stack.http.get("/health").status_code, stack.http.get("/health/live").status_code) == (503, 200)
        assert stack.http.get("/health").json() == {"status": "starting"}
        mark = Path(stack.run_dir, f"{COMPILING}worker-0")
        mark.touch()
        assert stack.http.get("/health").json() == {"status": "compiling"} and stack.http.get("/health").status_code == 503
        mark.unlink()
        assert stack.chat("x").status_code == 503
        stack.scheduler.beat(age=100.0)
        eventually(lambda: stack.http.get("/health").json() == {"status": "stalled"})
        assert stack.http.get("/health").status_code == 503
        stack.scheduler.beat()
        eventually(lambda: stack.http.get("/health").status_code == 200)
    finally:
        stack.close()


def _is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_everything_but_health_is_behind_the_key(model_folder: Path) -> None:
    """Red if a path, a spelling of the header or a wrong key gets past the guard; or if the queue limit is not a 503."""
    stack = Stack(model_folder, in_process=True, api_key="séc-ret", max_queued_requests=1)
    try:
        right = {"Authorization": b"Bearer " + "séc-ret".encode()}
        wrong: list[dict[str, bytes]] = [
            {},
            {"Authorization": b"Bearer x"},
            {"Authorization": b"Basic " + "séc-ret".encode()},
            {"Authorization": b""},
        ]
        for path in ("/v1/models", "/metrics", "/version", "/v1/chat/completions", "/health/../v1/models", "/nowhere", "/HEALTH"):
            for headers in wrong:
                assert stack.http.get(path, headers=headers).status_code == 401, path
        assert stack.http.get("/health").status_code == stack.http.get("/health/live").status_code == 200
        assert stack.http.get("/v1/models", headers=right).status_code == 200
        stack.http.headers = httpx.Headers([(b"Authorization", right["Authorization"])])
        _check_queue_limit(stack, right)
    finally:
        stack.close()


def _check_queue_limit(stack: Stack, headers: dict[str, bytes]) -> None:
    stack.scheduler.script = hold
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with (
        httpx.Client(base_url=stack.url, headers=headers) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as first,
    ):
        assert first.status_code == 200
        response = http.post("/v1/chat/completions", json=body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    eventually(lambda: len(stack.scheduler.aborted) == 1)


@pytest.mark.faults
@pytest.mark.parametrize("ending", ["signal", pytest.param("orphan", marks=pytest.mark.gate)])
def test_every_waiting_client_gets_an_error_at_the_end(model_folder: Path, ending: str) -> None:
    """Red if a client hangs when the server stops or its launcher dies, even one that is still sending; or if the processes or the run
    directory stay."""
    stack = Stack(model_folder)
    answers: dict[str, httpx.Response] = {}

    def ask(name: str, stream: bool) -> None:
        body = {"messages": [{"role": "user", "content": name}], "stream": stream}
        with httpx.Client(base_url=stack.url, timeout=HANG_GUARD_S) as http:
            answers[name] = http.post("/v1/chat/completions", json=body)

    def script(scheduler: FakeScheduler, request: object) -> None:
        is_first = len(scheduler.requests) == 1
        (hold if is_first else hold_silently)(scheduler, scheduler.requests[-1])

    stack.scheduler.script = script
    threads = []
    for i, (name, stream) in enumerate((("streaming", True), ("silent stream", True), ("document", False))):
        threads.append(threading.Thread(target=ask, args=(name, stream)))
        threads[-1].start()
        eventually(lambda count=i + 1: len(stack.scheduler.requests) == count)  # type: ignore[misc]
    sender = RawClient(stack)
    sender.send(b'{"messages": [', length=10 * MIB)
    large = b"x" * (7 * MIB)  # has no space once the sender has
    eventually(lambda: stack.http.post("/v1/chat/completions", content=large).status_code == 503, "the body arrives")
    stack.settle()
    if ending == "signal":
        stack.processes["api"].send_signal(signal.SIGTERM)
    else:
        stack.orphan()
    answer = b"".join(iter(lambda: sender.socket.recv(10_000), b""))  # to its end: head and body may come apart
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
    sender.leave()
    stack.close()


def test_a_lost_region_is_a_loud_death(model_folder: Path) -> None:
    """Red if the processor keeps serving after its bookkeeping broke: a release of a request that it does not know."""
    stack = Stack(model_folder, in_process=True)
    stack.scheduler.send([RequestOutput(7, [1], None, None, 0, Stages())], [7])
    with pytest.raises(AssertionError, match="a server failed"):
        eventually(lambda: stack.servers.check())
    stack.close()


def test_an_ignored_field_full_of_media_is_bounded(stack: Stack) -> None:
    """Red if data URIs outside of image parts are parsed as text without limit, or if a few of them are refused."""
    few = {"messages": [{"role": "user", "content": "x"}], "metadata": {"icon": uri(PLAIN["1x1"])}}
    assert stack.http.post("/v1/chat/completions", json=few).status_code == 200
    many = {**few, "metadata": {"icon": uri(b"\xff" * (7 * MIB))}}
    assert error_of(stack.http.post("/v1/chat/completions", json=many)) == (413, None)


def test_large_prompts_wait_for_each_other(stack: Stack) -> None:
    """Red if a prompt whose turn is yet to come is lost, also when clients ahead of it have left."""
    text = json.dumps({"messages": [{"role": "user", "content": "word " * 100_000}]}).encode()
    clients = [RawClient(stack) for _ in range(4)]
    for client in clients:
        client.send(text)
    for client in clients:
        client.leave()
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda i: stack.chat("word " * 100_000), range(6)))
    assert {answer.json()["error"]["code"] for answer in answers} == {"context_length_exceeded"}
