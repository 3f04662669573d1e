"""`VarlenAttention` with torch's kernels; images of one size form a dense batch."""

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.kernels.triton.tower import rotate_

# In order of speed on an H200; torch falls back to the next for an unsupported shape.
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class DenseVarlen:
    """See `VarlenAttention`."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int]] = []

    def plan(self, lengths: Sequence[int]) -> None:
        """Plan (count, length) of consecutive segments of equal length."""
        self._runs = [(len(list(members)), length) for length, members in groupby(lengths)]

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        rotate_(kvq_P3HK, cos_sin_PK)
        num_heads, head_dim = kvq_P3HK.shape[2:]
        out_PD = kvq_P3HK.new_empty((len(kvq_P3HK), num_heads * head_dim))
        sizes = [count * length for count, length in self._runs]
        with sdpa_kernel(KERNELS, set_priority=True):
            for (count, length), kvq, out in zip(self._runs, kvq_P3HK.split(sizes), out_PD.split(sizes), strict=True):
                k, v, q = kvq.view(count, length, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)
                out.view(count, length, num_heads, head_dim).copy_(F.scaled_dot_product_attention(q, k, v).transpose(1, 2))
        return out_PD
