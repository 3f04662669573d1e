"""Full attention inside each image, for all images of an encode at once, behind one Protocol."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from models.kernels.paged import Int32s
from models.kernels.units import cut


class VarlenAttention(Protocol):
    """Once an encode: `plan`; then `run` in each layer. Heads are stored in the order keys, values, queries."""

    def plan(self, lengths: Sequence[int]) -> None:
        """The patches of the coming `run` calls are segments of these lengths."""

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        """Rotates keys and queries, then every patch attends to all of its segment: (P, H * K). The scale is K ** -0.5. `cos_sin_PK`: see
        `rotary`; `kvq_P3HK` may be overwritten."""


def varlen_tiles(lengths: npt.NDArray[np.int64], tile_rows: int) -> Int32s:
    """(n, 4): first patch, number of patches (`tile_rows`, or a segment's rest), first patch and length of its segment."""
    segment, before, rows = cut(lengths, tile_rows)
    starts = (lengths.cumsum() - lengths)[segment]
    return np.stack((starts + before, rows, starts, lengths[segment]), axis=1).astype(np.int32)
