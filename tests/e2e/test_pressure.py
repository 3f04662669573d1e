"""Small budgets and clients that leave: the real processes preempt, evict, abort, and end with everything free."""

import http.client
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.serving import Engine, chat_body, image_part, picture, text_part
from tests.eventually import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.gate]

NUM_REQUESTS = 10
LONG = 40  # tokens of answers


def content(i: int) -> list[dict[str, object]]:
    return [image_part(picture(i % 6, 128, 128 + 32 * (i % 3))), image_part(picture(50 + i % 4, 96, 96)), text_part(f"Question {i}")]


def ask(engine: Engine, i: int) -> str:
    return engine.text(content(i % NUM_REQUESTS), max_tokens=LONG, ignore_eos=True)


def assert_everything_is_free(engine: Engine) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "engine_num_pinned_images"):
        eventually(lambda name=name: engine.metric(name) == 0, f"{name} == 0")
    eventually(lambda: engine.metric("engine_num_free_blocks") == engine.metric("engine_num_blocks"), "the release of all blocks")
    assert engine.client.get("/health").status_code == 200


def force_preemption(engine: Engine) -> None:
    """One request whose answers are admitted together and need more blocks than there are."""
    before = engine.metric("vllm:num_preemptions_total")
    response = engine.chat("Hello", n=12, temperature=1, seed=1, max_tokens=80, ignore_eos=True)
    assert response.status_code == 200 and len(response.json()["choices"]) == 12, response.text
    assert engine.metric("vllm:num_preemptions_total") > before


def test_preemption_and_eviction_change_no_answer(tiny_engine: Engine, tight: Engine) -> None:
    expected = [ask(tiny_engine, i) for i in range(NUM_REQUESTS)]
    force_preemption(tight)
    assert [ask(tight, i) for i in range(NUM_REQUESTS)] == expected, "one after the other: images are evicted"
    with ThreadPoolExecutor(NUM_REQUESTS) as pool:
        assert list(pool.map(lambda i: ask(tight, i), range(2 * NUM_REQUESTS))) == 2 * expected
    assert_everything_is_free(tight)
    assert tight.metric("engine_images_evicted_total") > 0


def leave(engine: Engine, body: bytes, num_sent: int, num_lines: int) -> None:
    connection = http.client.HTTPConnection(engine.url.removeprefix("http://"))
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(len(body)))
    connection.endheaders(body[:num_sent])
    if num_lines:
        response = connection.getresponse()
        assert response.status == 200
        for _ in range(num_lines):
            response.readline()
    connection.close()


def test_clients_that_leave_at_any_stage(tight: Engine) -> None:
    assert tight.client.post("/flush_cache").status_code == 200
    bodies = [json.dumps(chat_body(content(i), stream=True, max_tokens=400, ignore_eos=True)).encode() for i in range(12)]
    stages = [(len(body) // 2 if i < 3 else len(body), max(0, 4 * (i - 7))) for i, body in enumerate(bodies)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        for left in [pool.submit(leave, tight, body, *stage) for body, stage in zip(bodies, stages, strict=True)]:
            left.result()
    assert_everything_is_free(tight)
    assert tight.text("Still there?", max_tokens=3, ignore_eos=True) != ""
