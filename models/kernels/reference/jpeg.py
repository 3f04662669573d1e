"""`JpegDecoder` by Pillow, on CPU threads: the reference."""

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from PIL import Image

Image.MAX_IMAGE_PIXELS = None  # --max-image-pixels is the limit; Pillow's own would reject accepted images


class PillowDecoder:
    """See `JpegDecoder`. Pillow releases the interpreter lock while it decodes."""

    def __init__(self, num_threads: int, device: torch.device) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="jpeg")
        self._device = device

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        return [None if pixels is None else pixels.to(self._device) for pixels in self._pool.map(_decode, payloads)]


def _decode(payload: memoryview) -> torch.Tensor | None:
    try:
        with Image.open(io.BytesIO(payload), formats=("JPEG",)) as image:
            rgb = image.convert("RGB")
    except (OSError, ValueError, SyntaxError):
        return None
    return torch.frombuffer(bytearray(rgb.tobytes()), dtype=torch.uint8).view(rgb.height, rgb.width, 3)
