"""What an attack tries, on a GPU: files that are not what they claim, no memory for a step, a worker that stands still. After each of them
the demo model's answers are right."""

import base64
import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
from PIL import Image

from models.demo import CHECKPOINT
from tests.e2e.serving import Engine, image_part, picture, serve, text_part
from tests.unit.server.media_corpus import CORPUS

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

PICTURES = CHECKPOINT.parent / "pictures"
AT_ONCE = 8
SPARE_BYTES = 16 << 20
LARGE = 4096  # pixels a side: 48 MiB as RGB


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with serve(CHECKPOINT, "--backend", request.config.getoption("--backend"), is_small=False) as running:
        yield running


def assert_well(engine: Engine) -> None:
    parts = [image_part(Image.open(PICTURES / f"{name}.png")) for name in ("number", "star")]
    assert engine.text([*parts, text_part("What number is in picture 1?")]) == "472"
    assert engine.client.get("/health").status_code == 200


def test_files_that_are_not_what_they_claim(engine: Engine) -> None:
    def ask(name: str) -> tuple[str, int]:
        data, allowed = CORPUS[name]
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        status = engine.chat([{"type": "image_url", "image_url": {"url": url}}, text_part("What is it?")]).status_code
        return name, 0 if status in allowed else status

    with ThreadPoolExecutor(AT_ONCE) as pool:
        wrong = [(name, status) for name, status in pool.map(ask, CORPUS) if status]
    assert not wrong
    assert_well(engine)


@contextlib.contextmanager
def others_take_the_memory(device: int) -> Iterator[None]:
    torch.cuda.empty_cache()  # what earlier tests left in this process would serve as ballast, and nothing be taken
    free = torch.cuda.mem_get_info(device)[0]
    ballast = torch.empty(max(0, free - SPARE_BYTES), dtype=torch.uint8, device=torch.device("cuda", device))
    try:
        yield
    finally:
        del ballast
        torch.cuda.empty_cache()


def assert_some_refused_for_memory(answers: list[httpx.Response]) -> None:
    refused = [answer.json()["error"]["code"] for answer in answers if answer.status_code != 200]
    assert refused and set(refused) == {"out_of_memory"}


def test_a_step_without_memory_fails_alone(engine: Engine) -> None:
    """The engine does not go on with what was never computed."""
    parts = [[image_part(picture(seed, LARGE, LARGE), "JPEG"), text_part("What is it?")] for seed in range(4)]
    with others_take_the_memory(0):
        assert_some_refused_for_memory([engine.chat(content) for content in parts])
    assert all(engine.chat(content).status_code == 200 for content in parts)
    assert_well(engine)
