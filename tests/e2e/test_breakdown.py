"""The parts of a time to first token, measured on the demo model: client, transfer and stages leave no gap between them."""

import asyncio
import base64
import io

import numpy as np
from PIL import Image

from bench.breakdown import breakdown
from bench.client import ChatClient, chat_body, user_message
from tests.e2e.serving import serve

NUM_IMAGES = 24
TIMES = 12
NUM_GOOD = 3  # of the repetitions
SHARE = 0.05
ALWAYS_ALLOWED_MS = 2.0  # where all is tiny: both processes' way to the socket and back


def noise(seed: int) -> str:
    """Many bytes and few tokens: the body is large, the prompt short."""
    pixels = np.random.default_rng(seed).integers(0, 256, (320, 320, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=100, subsampling=0)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


async def ask_again(url: str) -> list[dict[str, float]]:
    body = chat_body("", [user_message([noise(i) for i in range(NUM_IMAGES)], "What is in picture 3?")], 4)
    async with ChatClient(url) as client:
        answers = [await client.chat(body) for _ in range(TIMES)]
    assert not [answer.error for answer in answers if answer.error]
    assert all(not answer.timings["images_encoded"] for answer in answers[1:])
    return [breakdown(answer) for answer in answers[1:]]


def test_the_parts_of_a_repeated_request_add_up() -> None:
    """Red if time passes between two boundaries that nobody counts, or is counted twice. The best ones: on a loaded machine each of the
    processes may pause anywhere.
    """
    with serve("demo") as engine:
        parts = asyncio.run(ask_again(engine.url))
    excess = sorted(abs(part["rest_ms"]) - max(ALWAYS_ALLOWED_MS, SHARE * sum(part.values())) for part in parts)
    assert excess[NUM_GOOD - 1] <= 0, parts
