"""The GPU's JPEG decoders against Pillow: pixels, samplings, and files that are broken."""

import io

import numpy as np
import pytest
import torch
from PIL import Image

from bench.pictures import make_jpeg
from models.kernels.triton.jpeg import NvImageCodecDecoder

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MAX_DIFFERENCE = 2


def encode(pixels: np.ndarray, mode: str, subsampling: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", quality=88, subsampling=subsampling)
    return buffer.getvalue()


def pillow(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def test_pixels_are_pillows() -> None:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((333, 257), Image.Resampling.BICUBIC))
    good = [encode(smooth, "RGB", sampling) for sampling in (0, 1, 2)] + [encode(smooth, "L", 0), encode(smooth[:17, :19], "RGB", 2)]
    good.append(make_jpeg(1, "720p", "noise"))
    broken = [b"\xff\xd8 no picture \xff\xd9", good[0][: len(good[0]) // 2]]
    payloads = [memoryview(data) for data in (good[0], broken[0], *good[1:], broken[1])]
    decoded = NvImageCodecDecoder(4, torch.device("cuda", 0)).decode(payloads)
    torch.cuda.synchronize()
    assert decoded[1] is None
    for data, pixels in zip(good, [decoded[0], *decoded[2:-1]], strict=True):
        assert pixels is not None
        assert np.abs(pixels.cpu().numpy().astype(int) - pillow(data)).max() <= MAX_DIFFERENCE
