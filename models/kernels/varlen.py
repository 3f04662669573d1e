"""Full attention within each image, for all images of an encode at once."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from models.kernels.paged import Int32s
from models.kernels.work_items import cut


class VarlenAttention(Protocol):
    """Protocol: call `plan` once per encode, then `run` for each layer. Heads are stored in the order keys, values, queries."""

    def plan(self, lengths: Sequence[int]) -> None:
        """Set the lengths of the segments for the next `run` calls."""

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        """Rotate keys and queries, attend within each segment and return (P, H * K). The scale is K ** -0.5. `cos_sin_PK`: see
        `rotary`; `kvq_P3HK` may be overwritten."""


def varlen_tiles(lengths: npt.NDArray[np.int64], tile_rows: int) -> Int32s:
    """Return (n, 4): first patch, number of patches (`tile_rows` or the rest), first patch and length of the segment."""
    segment, before, rows = cut(lengths, tile_rows)
    starts = (lengths.cumsum() - lengths)[segment]
    return np.stack((starts + before, rows, starts, lengths[segment]), axis=1).astype(np.int32)
