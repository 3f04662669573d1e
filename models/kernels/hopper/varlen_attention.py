"""`VarlenAttention` by `varlen_attention.cu`."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch

from models.kernels.hopper.compile import load_kernel
from models.kernels.hopper.tile_plan import ITEM_FIELDS, part_memory, plan_items
from models.kernels.triton.launch import num_multiprocessors
from models.kernels.triton.tower import rotate_
from models.kernels.varlen import varlen_tiles

MAX_ITEMS = 1 << 18  # limit per encode: three million patches with 16 heads
MAX_CACHED_PLANS = 128  # 20 to 400 kB each; the device waits while one is created


class HopperVarlen:
    """See `VarlenAttention`. Any mix of lengths is one launch."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        self._num_heads, self._num_blocks = num_heads, num_multiprocessors(device)
        self._scale = head_dim**-0.5
        self._head_dim, self._device = head_dim, device
        self._stage = lru_cache(MAX_CACHED_PLANS)(self._stage_items)
        self._items = torch.zeros((MAX_ITEMS, ITEM_FIELDS), dtype=torch.int32, device=device)  # at a fixed address, for CUDA graphs

    @cached_property
    def _kernel(self) -> Any:
        """Load the kernel at its first use: models are constructed during compilation."""
        return load_kernel("varlen_attention", self._head_dim)

    @cached_property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        return part_memory(self._kernel, self._num_blocks, self._device)

    def plan(self, lengths: Sequence[int]) -> None:
        staged = self._stage(tuple(lengths))
        self._items[: len(staged)].copy_(staged, non_blocking=True)  # torch reuses pinned memory only when its copy is done

    def _stage_items(self, lengths: tuple[int, ...]) -> torch.Tensor:
        tiles = varlen_tiles(np.asarray(lengths), self._kernel.tile_rows())
        return torch.from_numpy(plan_items(tiles, self._num_heads, self._kernel.tile_keys(), self._num_blocks)).pin_memory()

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        rotate_(kvq_P3HK, cos_sin_PK)
        k_PHK, v_PHK, q_PHK = kvq_P3HK.unbind(1)
        out_PD = kvq_P3HK.new_empty((len(kvq_P3HK), q_PHK.shape[1] * q_PHK.shape[2]))
        self._kernel.run(q_PHK, k_PHK, v_PHK, out_PD, self._items, *self._memory, self._num_blocks, self._scale)
        return out_PD
