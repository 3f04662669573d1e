"""`SegmentAttention` on a kernel of our own for Hopper, `segment_attention.cu`. Made by `make_segment_attention`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from models.layers.compile_cuda import load_kernel
from models.layers.kernels_text import num_multiprocessors
from models.layers.kernels_vision import rotate_
from models.layers.segments import TILE_FIELDS, plan_tiles

MAX_TILES = 1 << 15  # of one encode: four million patches


class Kernel(Protocol):
    """What `segment_attention.cu` exports."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        tiles: torch.Tensor,
        num_large: int,
        num_small: int,
        num_blocks: int,
        scale: float,
    ) -> None:
        """q, k, v (P, H, K) views whose heads are side by side, out (P, H * K), tiles: see `plan_tiles`."""

    def tile_rows(self) -> int:
        """Queries of a large tile."""


class HopperSegments:
    """See `SegmentAttention`. Any mix of lengths is one launch; nothing is compiled or searched for a new length."""

    def __init__(self, num_heads: int, head_dim: int, device: torch.device) -> None:
        self._num_heads, self._num_blocks = num_heads, num_multiprocessors(device)
        self._scale = head_dim**-0.5
        self._kernel: Kernel = load_kernel("segment_attention", head_dim)
        self._tile_rows = self._kernel.tile_rows()
        self._tiles = torch.zeros((MAX_TILES, TILE_FIELDS), dtype=torch.int32, device=device)  # at a fixed address, for CUDA graphs
        self._counts = 0, 0  # of large and small tiles

    def plan(self, lengths: Sequence[int]) -> None:
        tiles, num_large = plan_tiles(np.asarray(lengths), self._num_heads, self._num_blocks, self._tile_rows)
        self._counts = num_large, len(tiles) - num_large
        staged = torch.from_numpy(tiles).pin_memory()
        self._tiles[: len(tiles)].copy_(staged, non_blocking=True)  # torch reuses pinned memory only when its copy is done

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        rotate_(kvq_P3HK, cos_sin_PK)
        k_PHK, v_PHK, q_PHK = kvq_P3HK.unbind(1)
        out_PD = kvq_P3HK.new_empty((len(kvq_P3HK), q_PHK.shape[1] * q_PHK.shape[2]))
        self._kernel.run(q_PHK, k_PHK, v_PHK, out_PD, self._tiles, *self._counts, self._num_blocks, self._scale)
        return out_PD
