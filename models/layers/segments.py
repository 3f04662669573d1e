"""Full attention inside each image, for all images of an encode at once, behind one Protocol. Used by `models.vision`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

TILE_FIELDS = 4  # first query of a tile in its segment, number of queries, first row and length of the segment
GROUP_ROWS = 64  # of queries, which a group of threads computes; a tile has a few groups


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
        from models.layers.segments_cuda import HopperSegments  # needs Triton, which a CPU machine may lack

        return HopperSegments(num_heads, head_dim, device)
    from models.layers.segments_torch import TorchSegments

    return TorchSegments()


def plan_tiles(lengths: npt.NDArray[np.int64], num_heads: int, num_blocks: int, tile_rows: int) -> tuple[npt.NDArray[np.int32], int]:
    """(n, TILE_FIELDS) int32: what each head computes; and how many of these tiles, which come first, are large: of `tile_rows` queries.

    Blocks compute the large tiles of all heads in full rounds. What is left, less than a round, is cut into small tiles, so that every
    block has one of them: without them most blocks would be idle in the last round.
    """
    per_tile, groups = tile_rows // GROUP_ROWS, -(-lengths // GROUP_ROWS)
    most = groups // per_tile
    rounds, rest = divmod(int(groups.sum()) * num_heads, per_tile * num_blocks)
    small = -(-rest // num_blocks) or per_tile  # groups of a small tile
    num_large = int(most.sum()) if small == per_tile else min(int(most.sum()), rounds * num_blocks // num_heads)
    large = np.diff(most.cumsum() * num_large // max(1, int(most.sum())), prepend=0)  # of each segment: its share
    starts = lengths.cumsum() - lengths

    def tiles(counts: npt.NDArray[np.int64], first_queries: npt.NDArray[np.int64], rows: int) -> npt.NDArray[np.int64]:
        segment = np.repeat(np.arange(len(lengths)), counts)
        number = np.arange(len(segment)) - (counts.cumsum() - counts)[segment]
        query = first_queries[segment] + number * rows
        return np.stack((query, np.minimum(lengths[segment] - query, rows), starts[segment], lengths[segment]), axis=1)

    rest_of_each = tiles(-(-(groups - large * per_tile) // small), large * tile_rows, small * GROUP_ROWS)
    return np.concatenate((tiles(large, np.zeros_like(lengths), tile_rows), rest_of_each)).astype(np.int32), num_large
