"""Files that are not what they claim, on a GPU. Afterwards the demo model's answers are right."""

import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from PIL import Image

from models.demo import CHECKPOINT
from tests.e2e.serving import Engine, image_part, serve, text_part
from tests.unit.server.media_corpus import CORPUS

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

PICTURES = CHECKPOINT.parent / "pictures"
AT_ONCE = 8


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
