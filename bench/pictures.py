"""Random JPEGs of the benchmarks' sizes, new for every request.

Uniform noise at quality 85 is the rule of the published image-limit probe (0.7 / 1.6 / 2.8 MB at 720p / 1080p / 2K), the worst case for
every stage that processes bytes. Smooth noise at quality 90 is about half of that and closer to photographs.
"""

import io
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import numpy.typing as npt
import pybase64
from PIL import Image

Content = Literal["noise", "smooth"]
Pixels = npt.NDArray[np.uint8]
RESOLUTIONS = {"small": (320, 192), "720p": (1280, 720), "1080p": (1920, 1080), "2k": (2560, 1440)}
QUALITY: dict[str, int] = {"noise": 85, "smooth": 90}
NOISE_AMPLITUDE = 24


def smooth(rng: np.random.Generator, coarse: tuple[int, int], height: int, width: int) -> npt.NDArray[np.int16]:
    """Return random pixels of `coarse` (rows, columns), enlarged to this size."""
    pixels = Image.fromarray(rng.integers(0, 256, (*coarse, 3), dtype=np.uint8))
    return np.asarray(pixels.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)


def with_noise(rng: np.random.Generator, pixels: npt.NDArray[np.int16], amplitude: int) -> Pixels:
    noise = rng.integers(-amplitude, amplitude + 1, (*pixels.shape[:2], 1), dtype=np.int16)
    return np.clip(pixels + noise, 0, 255).astype(np.uint8)


def encode(pixels: Pixels, quality: int = QUALITY["smooth"]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()


def make_jpeg(seed: int, resolution: str, content: Content) -> bytes:
    width, height = RESOLUTIONS[resolution]
    rng = np.random.default_rng(seed)
    if content == "noise":
        return encode(rng.integers(0, 256, (height, width, 3), dtype=np.uint8), QUALITY[content])
    return encode(with_noise(rng, smooth(rng, (9, 16), height, width), NOISE_AMPLITUDE))


def make_jpegs(seed: int, count: int, resolution: str, content: Content) -> list[bytes]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda i: make_jpeg(seed * 100_003 + i, resolution, content), range(count)))


def make_uris(seed: int, count: int, resolution: str, content: Content) -> list[str]:
    return [data_uri(jpeg) for jpeg in make_jpegs(seed, count, resolution, content)]


def blank(mode: str, side: int, format: str) -> str:
    """Return the `data:` URI of a small file with many pixels."""
    buffer = io.BytesIO()
    Image.new(mode, (side, side)).save(buffer, format)
    return data_uri(buffer.getvalue(), f"image/{format.lower()}")


def data_uri(data: bytes, kind: str = "image/jpeg") -> str:
    return f"data:{kind};base64,{pybase64.b64encode(data).decode()}"
