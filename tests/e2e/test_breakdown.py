"""The parts of a time to first token: the engine reports every stage, and no time is in two of them."""

import asyncio
import base64
import io

import numpy as np
import pytest
from PIL import Image

from bench.breakdown import STAGES, breakdown
from bench.client import Answer, ChatClient, chat_body, user_message
from tests.e2e.serving import Engine

pytestmark = pytest.mark.e2e

NUM_IMAGES = 24
ROUNDING_MS = 0.1


def noise(seed: int) -> str:
    """A picture of many bytes and few tokens: the body is large, the prompt short."""
    pixels = np.random.default_rng(seed).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=100, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


async def ask_twice(url: str) -> list[Answer]:
    body = chat_body("", [user_message([noise(i) for i in range(NUM_IMAGES)], "What is in picture 3?")], 4)
    async with ChatClient(url) as client:
        return [await client.chat(body) for _ in range(2)]


def test_the_parts_are_consecutive(demo: Engine) -> None:
    """If a time were in two stages, the parts would be longer than the whole."""
    for answer in asyncio.run(ask_twice(demo.url)):
        parts = breakdown(answer)
        assert not answer.error and parts.keys() >= set(STAGES)
        assert min(value for name, value in parts.items() if name != "rest_ms") >= 0 and parts["rest_ms"] >= -ROUNDING_MS, parts
    assert not answer.timings["images_encoded"]
