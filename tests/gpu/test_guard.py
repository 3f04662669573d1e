"""What an attack tries, on a GPU: files that are not what they claim, no memory for a step, a worker that stands still. After each of them
the demo model's answers are right."""

import base64
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from PIL import Image

from models.demo import CHECKPOINT
from tests.e2e.serving import Engine, image_part, picture, role_of, serve, text_part
from tests.unit.server.media_corpus import CORPUS

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

PICTURES = CHECKPOINT.parent / "pictures"
AT_ONCE = 8
SPARE_BYTES = 16 << 20
LARGE = 4096  # pixels a side: 48 MiB as RGB
NOTICED_S = 10


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with serve(CHECKPOINT, "--backend", request.config.getoption("--backend"), is_small=False) as running:
        yield running


def assert_well(engine: Engine) -> None:
    parts = [image_part(Image.open(PICTURES / f"{name}.png")) for name in ("number", "star")]
    assert engine.text([*parts, text_part("What number is in picture 1?")]) == "472"
    assert engine.client.get("/health").status_code == 200


def test_files_that_are_not_what_they_claim(engine: Engine) -> None:
    """Red if one of them is a 500, ends the worker, or leaves something behind in the decoder that a later image gets to see."""

    def ask(name: str) -> tuple[str, int]:
        data, allowed = CORPUS[name]
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        status = engine.chat([{"type": "image_url", "image_url": {"url": url}}, text_part("What is it?")]).status_code
        return name, 0 if status in allowed else status

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [(name, status) for name, status in pool.map(ask, CORPUS) if status]
    assert not wrong
    assert_well(engine)


def test_a_step_without_memory_fails_alone(engine: Engine) -> None:
    """Red if the engine ends, or goes on with what was never computed, when others have taken the device's memory."""
    parts = [[image_part(picture(seed, LARGE, LARGE), "JPEG"), text_part("What is it?")] for seed in range(4)]
    ballast = torch.empty(max(0, torch.cuda.mem_get_info()[0] - SPARE_BYTES), dtype=torch.uint8, device="cuda")
    try:
        answers = [engine.chat(content) for content in parts]
    finally:
        del ballast
        torch.cuda.empty_cache()
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert refused and set(refused) == {"out_of_memory"}
    assert all(engine.chat(content).status_code == 200 for content in parts)
    assert_well(engine)


def test_a_worker_that_stands_still_is_noticed_and_goes_on(engine: Engine) -> None:
    """Red if an engine that computes nothing looks healthy, or if one that goes on does not."""
    worker = next(pid for pid in engine.children if role_of(pid) == "worker")
    os.kill(worker, signal.SIGSTOP)
    try:
        deadline = time.monotonic() + NOTICED_S
        while httpx.get(f"{engine.url}/health").status_code == 200:
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.2)
    finally:
        os.kill(worker, signal.SIGCONT)
    deadline = time.monotonic() + NOTICED_S
    while httpx.get(f"{engine.url}/health").status_code != 200:
        assert time.monotonic() < deadline, "what goes on is not seen to"
        time.sleep(0.2)
    assert_well(engine)
