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
        self._runs: list[tuple[int, int, int]] = []

    def plan(self, lengths: Sequence[int]) -> None:
        """Plan (first patch, count, length) of consecutive segments of equal length."""
        self._runs = []
        first = 0
        for length, members in groupby(lengths):
            count = len(list(members))
            self._runs.append((first, count, length))
            first += count * length

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        rotate_(kvq_P3HK, cos_sin_PK)
        num_heads, head_dim = kvq_P3HK.shape[2:]
        out_PD = kvq_P3HK.new_empty((len(kvq_P3HK), num_heads * head_dim))
        with sdpa_kernel(KERNELS, set_priority=True):
            for first, count, length in self._runs:
                end = first + count * length
                k, v, q = kvq_P3HK[first:end].view(count, length, 3, num_heads, head_dim).permute(2, 0, 3, 1, 4)
                out = F.scaled_dot_product_attention(q, k, v)
                out_PD[first:end].view(count, length, num_heads, head_dim).copy_(out.transpose(1, 2))
        return out_PD
