"""Random JPEGs of the benchmarks' sizes, new for every request.

Uniform noise at quality 85 is the rule of the published image-limit probe (0.7 / 1.6 / 2.8 MB at 720p / 1080p / 2K), the worst case for
every stage that processes bytes. Smooth noise at quality 90 is about half of that and closer to photographs.
"""

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import pybase64
from PIL import Image

Content = Literal["noise", "smooth"]
RESOLUTIONS = {"small": (320, 192), "720p": (1280, 720), "1080p": (1920, 1080), "2k": (2560, 1440)}
QUALITY: dict[str, int] = {"noise": 85, "smooth": 90}
NOISE_AMPLITUDE = 24


def make_jpeg(seed: int, resolution: str, content: Content) -> bytes:
    """Return a JPEG, a function of the arguments."""
    width, height = RESOLUTIONS[resolution]
    rng = np.random.default_rng(seed)
    if content == "noise":
        pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    else:
        coarse = Image.fromarray(rng.integers(0, 256, (9, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        noise = rng.integers(-NOISE_AMPLITUDE, NOISE_AMPLITUDE + 1, (height, width, 1), dtype=np.int16)
        pixels = np.clip(smooth + noise, 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY[content])
    return buffer.getvalue()


def make_jpegs(seed: int, count: int, resolution: str, content: Content, threads: int = 8) -> list[bytes]:
    """Return `count` different JPEGs, determined by `seed`."""
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda i: make_jpeg(seed * 100_003 + i, resolution, content), range(count)))


def data_uri(jpeg: bytes) -> str:
    return f"data:image/jpeg;base64,{pybase64.b64encode(jpeg).decode()}"
