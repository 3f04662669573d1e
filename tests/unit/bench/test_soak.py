"""The soak's kinds of traffic."""

import base64
import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from bench.client import ChatClient
from bench.soak import CHANGED_SIDE, ChangedImage


def pixels_of(body: dict[str, Any]) -> npt.NDArray[np.int16]:
    (uri,) = (part["image_url"]["url"] for part in body["messages"][0]["content"] if part["type"] == "image_url")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))), dtype=np.int16)


async def test_each_image_is_another_one_by_a_few_pixels() -> None:
    async with ChatClient("http://127.0.0.1:1") as client:
        traffic = ChangedImage(client, "demo", 0)
        first, second = (pixels_of(traffic.body()) for _ in range(2))
    differs = np.abs(first - second).max(axis=2) > 8
    assert 0 < differs.sum() < 50 * CHANGED_SIDE**2 < differs.size / 1000
