"""Decoding of baseline JPEGs."""

from collections.abc import Sequence
from typing import Protocol

import torch


class JpegDecoder(Protocol):
    """Decoder of batches; pixels are within 2/255 of Pillow's, before EXIF orientation is applied."""

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        """Return uint8 (height, width, 3) on the device for each payload, None for one that cannot be decoded."""
