"""Full attention inside each image, for all images of an encode at once, behind one Protocol. Used by `models.vision`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

TILE_FIELDS = 4  # number of a tile in its segment, first row and length of the segment, nothing


class SegmentAttention(Protocol):
    """Once an encode: `plan`; then `run` in each layer. Heads are stored in the order keys, values, queries."""

    def plan(self, lengths: Sequence[int]) -> None:
        """The patches of the coming `run` calls are segments of these lengths, one after the other."""

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        """Rotates keys and queries, then every patch attends to all of its segment: (P, H * K). The scale is K ** -0.5.

        `cos_sin_PK` is float32, one row per patch, K / 2 cosines then K / 2 sines. `kvq_P3HK` may be overwritten.
        """


def make_segment_attention(num_heads: int, head_dim: int, device: torch.device) -> SegmentAttention:
    """The implementation for this device."""
    if device.type == "cuda":
        from models.layers.segments_cuda import HopperSegments  # needs FlashInfer, which a CPU machine lacks

        return HopperSegments(num_heads, head_dim, device)
    from models.layers.segments_torch import TorchSegments

    return TorchSegments()


def plan_tiles(lengths: npt.NDArray[np.int64], tile_rows: int) -> npt.NDArray[np.int32]:
    """(n, TILE_FIELDS) int32: the tiles of all segments, in order."""
    counts = -(-lengths // tile_rows)
    segment = np.repeat(np.arange(len(lengths)), counts)
    number = np.arange(len(segment)) - (np.cumsum(counts) - counts)[segment]
    start = (np.cumsum(lengths) - lengths)[segment]
    return np.stack((number, start, lengths[segment], np.zeros_like(number)), axis=1).astype(np.int32)
