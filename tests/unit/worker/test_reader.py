"""What the worker reads images from: encodings that a plan may name."""

import io
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from PIL import Image

from engine.arena import Arena, ArenaView, create_memfd
from engine.messages import ImageSource, Region
from engine.worker.jpeg import ImageReader, PillowDecoder

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


@pytest.mark.parametrize("encoding", ["jpeg", "rgb"])
def test_an_early_read_is_of_a_copy(encoding: Literal["jpeg", "rgb"]) -> None:
    """Red if bytes that another request's are written over, because theirs has ended, are read while that happens."""
    pixels = np.random.default_rng(0).integers(0, 256, (8, 16, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG")
    data = buffer.getvalue() if encoding == "jpeg" else pixels.tobytes()
    arena = Arena(create_memfd("arena", 4096), 4096)
    arena.view(0, len(data))[:] = data
    decoder = LateDecoder(1, CPU)
    reader = ImageReader(arena, decoder, CPU)
    source = ImageSource(encoding, Region(1, 0, len(data)), 8, 16)
    decoder.meanwhile = lambda: None
    (expected,) = reader.read([source])
    assert expected is not None
    expected = expected.clone()

    def overwrite() -> None:
        arena.view(0, len(data))[:] = bytes(len(data))

    reader.read_copy(ImageSource("rgb", Region(1, 0, 12), 2, 2))  # a smaller one before
    decoder.meanwhile = overwrite
    read = reader.read_copy(source)
    overwrite()
    assert read is not None and torch.equal(read, expected)
