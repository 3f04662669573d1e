"""What the worker reads images from: encodings that a plan may name."""

import pytest
import torch

from engine.arena import ArenaView, create_memfd
from engine.messages import ImageSource, Region
from engine.worker.jpeg import ImageReader
from models.backends.torch.jpeg import PillowDecoder

CPU = torch.device("cpu")


def test_a_plan_without_pixels_is_a_bug() -> None:
    """Red if a file, of which the worker knows neither the format nor the pixels, is taken for RGB."""
    reader = ImageReader(ArenaView(create_memfd("arena", 4096), 4096), PillowDecoder(1, CPU), CPU)
    with pytest.raises(AssertionError, match="without its pixels"):
        reader.read([ImageSource("file", Region(1, 0, 12), 2, 2)])
