"""What the worker reads images from: encodings that a plan may name."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.arena import Arena, ArenaView, create_memfd
from engine.messages import ImageSource, Region
from engine.worker.jpeg import ImageReader
from models.backends.torch.jpeg import PillowDecoder

CPU = torch.device("cpu")


def test_a_plan_without_pixels_is_a_bug() -> None:
    """Red if a file, of which the worker knows neither the format nor the pixels, is taken for RGB."""
    reader = ImageReader(ArenaView(create_memfd("arena", 4096), 4096), PillowDecoder(1, CPU), CPU)
    with pytest.raises(AssertionError, match="without its pixels"):
        reader.read([ImageSource("file", Region(1, 0, 12), 2, 2)])


class LateDecoder(PillowDecoder):
    """Looks at the bytes only after `meanwhile`, as a device may."""

    meanwhile: Callable[[], None]

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        self.meanwhile()
        return super().decode(payloads)


def jpeg_of(height: int, width: int, **options: Any) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def test_an_early_read_is_of_a_copy() -> None:
    """Red if bytes that another request's are written over, because theirs has ended, are read while that happens."""
    small, data = jpeg_of(8, 8), jpeg_of(8, 16)
    arena = Arena(create_memfd("arena", 4096), 4096)
    arena.view(0, len(data))[:] = data
    arena.view(2048, len(small))[:] = small
    decoder = LateDecoder(1, CPU)
    reader = ImageReader(arena, decoder, CPU)
    source = ImageSource("jpeg", Region(1, 0, len(data)), 8, 16)
    decoder.meanwhile = lambda: None
    (expected,) = reader.read([source])
    reader.read_copy(ImageSource("jpeg", Region(1, 2048, len(small)), 8, 8))  # a smaller one before
    decoder.meanwhile = lambda: arena.view(0, len(data)).__setitem__(slice(None), bytes(len(data)))
    read = reader.read_copy(source)
    assert read is not None and expected is not None and torch.equal(read, expected)


@pytest.mark.parametrize(
    ("data", "size", "orientation", "is_read"),
    [
        (jpeg_of(8, 16), (8, 16), 1, True),
        (jpeg_of(8, 16), (16, 8), 6, True),
        (jpeg_of(8, 16), (16, 8), 1, False),
        (jpeg_of(64, 64), (8, 16), 1, False),
        (jpeg_of(8, 16, progressive=True), (8, 16), 1, False),
        (jpeg_of(8, 16)[:-2], (8, 16), 1, False),
        (b"\x89PNG" + jpeg_of(8, 16), (8, 16), 1, False),
        (b"", (8, 16), 1, False),
    ],
)
def test_an_early_read_decodes_nothing_else(data: bytes, size: tuple[int, int], orientation: int, is_read: bool) -> None:
    """Red if what lies where a plain JPEG was, which may be a file that was refused, and of any size, gets into a decoder."""
    arena = Arena(create_memfd("arena", 16_384), 16_384)
    arena.view(0, len(data))[:] = data
    decoder = LateDecoder(1, CPU)
    decoded: list[int] = []
    decoder.meanwhile = lambda: decoded.append(1)
    read = ImageReader(arena, decoder, CPU).read_copy(ImageSource("jpeg", Region(1, 0, len(data)), *size, orientation))
    assert (read is not None) == is_read == bool(decoded)
