"""Attention of images whose patches are distributed over ranks, by Ulysses' exchange of patches for heads (arXiv 2309.14509).

own patches, all heads ──all-to-all──▶ all patches, own heads ──attention, all-to-all──▶ own patches, all heads
"""

from collections.abc import Sequence

import torch

from models.kernels.varlen import VarlenAttention
from models.parallel.group import TensorParallel
from models.vision.shares import part_of


class UlyssesAttention:
    """`VarlenAttention` of whole images or, after `plan_parts`, of images whose patches are distributed over all ranks, in groups of
    `group_size`."""

    def __init__(self, whole: VarlenAttention, of_own_heads: VarlenAttention, tp: TensorParallel, group_size: int) -> None:
        self._whole, self._of_own_heads = whole, of_own_heads
        self._tp, self._group_size = tp, group_size
        self._counts: list[int] = []  # patches of each rank; empty: every rank has whole images

    def plan(self, lengths: Sequence[int]) -> None:
        self._counts = []
        self._whole.plan(lengths)

    def plan_parts(self, lengths: Sequence[int]) -> slice:
        """Plan the next `run` calls, which get this rank's patches and the rotary rows of all. Return this rank's patches. Collective."""
        parts = [part_of(sum(lengths) // self._group_size, rank, self._tp.size) for rank in range(self._tp.size)]
        self._counts = [len(part) * self._group_size for part in parts]
        self._of_own_heads.plan(lengths)
        own = parts[self._tp.rank]
        return slice(own.start * self._group_size, own.stop * self._group_size)

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        if not self._counts:
            return self._whole.run(kvq_P3HK, cos_sin_PK)
        num_own, num_heads, size = len(kvq_P3HK), kvq_P3HK.shape[2], self._tp.size
        own = [num_own] * size
        by_rank = kvq_P3HK.unflatten(2, (size, num_heads // size)).movedim(2, 0).flatten(0, 1)
        out_PD = self._of_own_heads.run(self._tp.all_to_all_rows(by_rank, own, self._counts), cos_sin_PK)
        return self._tp.all_to_all_rows(out_PD, self._counts, own).view(size, num_own, -1).transpose(0, 1).flatten(1)
