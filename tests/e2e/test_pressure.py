"""Small budgets, many requests, clients that leave: the real processes preempt, evict, abort, and end with everything free."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench import stress
from tests.e2e.serving import Engine, chat_body, image_part, picture, serve, text_part

pytestmark = pytest.mark.e2e

TIGHT = [
    "--num-gpu-blocks-override",
    "40",
    "--image-cache-bytes",
    "400K",
    "--max-num-batched-tokens",
    "256",
    "--max-num-mixed-tokens",
    "128",
]
NUM_REQUESTS = 10
NUM_CANARIES = 110
LONG, SHORT = 40, 16  # tokens of answers
HEARTBEAT_S = 1.0  # the engine's processes check themselves at idle with every heartbeat


def content(i: int) -> list[dict[str, object]]:
    return [image_part(picture(i % 6, 128, 128 + 32 * (i % 3))), image_part(picture(50 + i % 4, 96, 96)), text_part(f"Question {i}")]


@pytest.fixture(scope="module")
def tight(tiny: Path) -> Iterator[Engine]:
    """An engine that each test leaves with everything free."""
    with serve(tiny, *TIGHT) as engine:
        yield engine


def await_idle(engine: Engine) -> None:
    deadline = time.monotonic() + 20
    while engine.metric("engine_num_running") + engine.metric("engine_num_waiting") > 0:
        assert time.monotonic() < deadline, "requests are left"
        time.sleep(0.2)


def assert_everything_is_free(engine: Engine) -> None:
    """All blocks free or cached, all pins zero; arenas are empty, or the processes that own them would have died of it."""
    await_idle(engine)
    deadline = time.monotonic() + 20
    while engine.metric("engine_num_free_blocks") != engine.metric("engine_num_blocks"):
        assert time.monotonic() < deadline, "blocks are held"  # a heartbeat may tell of requests that have just ended
        time.sleep(0.2)
    assert engine.metric("engine_num_pinned_images") == 0
    time.sleep(2 * HEARTBEAT_S)
    assert engine.client.get("/health").status_code == 200


def ask(engine: Engine, i: int, num_tokens: int) -> str:
    return engine.text(content(i % NUM_REQUESTS), max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def expected(tiny: Path) -> dict[int, list[str]]:
    """By their length, what an engine with room for all answers to one request after the other."""
    with serve(tiny) as engine:
        return {num_tokens: [ask(engine, i, num_tokens) for i in range(NUM_REQUESTS)] for num_tokens in (LONG, SHORT)}


def test_preemption_and_eviction_change_no_answer(tiny: Path, expected: dict[int, list[str]]) -> None:
    """Red if recomputation or restoring under pressure gives another answer, deadlocks, or leaks."""
    with serve(tiny, *TIGHT, "--image-host-cache-bytes", "1M") as engine, ThreadPoolExecutor(NUM_REQUESTS) as pool:
        happened = False
        for _ in range(4):  # how requests meet is a matter of other processes, too
            got = list(pool.map(lambda i: ask(engine, i, LONG), range(2 * NUM_REQUESTS)))
            assert got == 2 * expected[LONG]
            assert_everything_is_free(engine)
            happened = all(engine.metric(f"engine_{name}_total") > 0 for name in ("preemptions", "images_evicted", "images_restored"))
            if happened:
                break
        assert happened


@pytest.mark.nightly
def test_canaries_sing_under_pressure(tight: Engine, expected: dict[int, list[str]]) -> None:
    """Red if one answer of many is another one while requests preempt each other and images are evicted and encoded again: whatever was
    read was not its."""
    totals = ("engine_preemptions_total", "engine_images_evicted_total")
    before = [tight.metric(name) for name in totals]
    with ThreadPoolExecutor(32) as pool:
        for _ in range(4):  # as above
            got = list(pool.map(lambda i: ask(tight, i, SHORT), range(NUM_CANARIES)))
            assert [i for i, answer in enumerate(got) if answer != expected[SHORT][i % NUM_REQUESTS]] == []
            assert_everything_is_free(tight)
            if happened := all(tight.metric(name) > old for name, old in zip(totals, before, strict=True)):
                break
    assert happened and tight.metric("engine_images_restored_total") == 0


@pytest.mark.nightly
def test_a_mixed_stress_leaves_nothing() -> None:
    """Red if `bench.stress` fails, or if dialects, images, schemas and clients that leave, all at once, make an error or leave a block."""
    with serve("demo") as engine:
        flags = ["--url", engine.url, "--seconds", "6", "--concurrency", "6", "--resolution", "small", "--pid", str(engine.process.pid)]
        result = asyncio.run(stress.stress(stress.parse_args(flags)))
    assert result["answered"] > 5 and result["errors"] == {}, result
    assert result["at_rest"]["engine_num_free_blocks"] == result["at_rest"]["engine_num_blocks"] > 0
    assert set(result["memory_mib"]) >= {"api", "processor", "scheduler"} and result["health_ms"]["p99"] > 0


def test_a_prompt_that_the_pool_never_holds(tight: Engine) -> None:
    """Red if the length that clients are told, or the error of a longer prompt, knows nothing of a small KV pool."""
    limit = tight.client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert limit == 40 * 16 == tight.metric("engine_max_model_len")
    response = tight.client.post("/v1/chat/completions", json=chat_body("word " * limit))
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded" and str(limit) in response.json()["error"]["message"]
    assert tight.text("Still well?")


def test_clients_that_leave_at_any_stage(tight: Engine) -> None:
    """Red if a disconnect while sending, waiting, prefilling or streaming leaks a block, a pin, a row or arena bytes."""
    rng = random.Random(0)

    def leave(i: int) -> None:
        body = chat_body(content(i), stream=True, max_tokens=400, ignore_eos=True)
        try:
            with httpx.stream("POST", f"{tight.url}/v1/chat/completions", json=body, timeout=rng.choice([0.02, 0.1, 0.5, 2])) as response:
                for _, _line in zip(range(rng.randint(0, 8)), response.iter_lines(), strict=False):
                    pass
        except httpx.HTTPError:
            pass

    assert tight.client.post("/flush_cache").status_code == 200  # all stages take their time
    threads = [threading.Thread(target=leave, args=(i,)) for i in range(NUM_REQUESTS)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    assert_everything_is_free(tight)
    assert tight.text("Still there?", max_tokens=3, ignore_eos=True) != ""


def test_only_images_that_overlap_the_chunk_are_encoded(tiny: Path) -> None:
    """Red if a step encodes ahead or twice: 8 images, small chunks, counted from the step log."""
    parts = [image_part(picture(200 + i, 256, 256)) for i in range(8)]
    with serve(
        tiny, "--log-level", "debug", "--max-num-batched-tokens", "64", "--max-num-mixed-tokens", "64", "--max-num-seqs", "4"
    ) as engine:
        engine.text([*parts, text_part("?")], max_tokens=2, ignore_eos=True)
        assert engine.metric("engine_images_encoded_total") == 8
        counts = [int(line.split(" images encoded")[0].rsplit(" ", 1)[1]) for line in engine.log().splitlines() if "images encoded" in line]
        sizes = [int(line.rsplit("plan of ", 1)[1].split()[0]) for line in engine.log().splitlines() if "plan of " in line]
    assert sum(counts) == 8 and max(counts) <= 2, "a chunk of 64 tokens overlaps at most two images of 64 tokens"
    assert max(sizes) < 2000, "a plan carries more than pointers"
