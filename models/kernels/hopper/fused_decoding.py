"""Attention of few decode rows with norm, rotation and store: plans for `fused_decoding.cu`."""

from collections.abc import Sequence

import numpy as np
import torch

from models.cache.layout import AttentionLayout
from models.kernels.hopper.compile import FUSED_HEAD_DIM, load_kernel
from models.kernels.hopper.tuned import ANY_SPLITS, FUSED_ROWS, WHOLE_GPU, fused_cluster
from models.kernels.ops import KVPool, NewHeads
from models.kernels.paged import Int32s, PagedAttention
from models.kernels.triton.launch import num_multiprocessors


class FusedDecoding(PagedAttention):
    """See `FusedAttention`: `num_rows` rows of one token. Values in pages must be finite as for `Split`."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int, num_rows: int, max_pages: int) -> None:
        super().__init__(pools, [], max_pages)
        self._num_heads, self._num_rows = num_heads, num_rows
        self._page_size, kv_heads, head_dim = pools[0][0].shape[1:]
        self._kernel = load_kernel("fused_decoding", head_dim)
        self._cluster = fused_cluster(kv_heads, num_heads // kv_heads)

    @staticmethod
    def takes(pools: Sequence[KVPool], num_heads: int, num_rows: int) -> bool:
        """Return whether the kernel supports these heads, runs on this GPU, and is the fastest for so many rows."""
        keys = pools[0][0]
        kv_heads, head_dim = keys.shape[2:]
        if num_rows > FUSED_ROWS or head_dim != FUSED_HEAD_DIM:
            return False
        return fused_cluster(kv_heads, num_heads // kv_heads)[0] <= ANY_SPLITS or num_multiprocessors(keys.device) >= WHOLE_GPU

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s, ...]:
        """Return (R, 2): the number of a row's keys including the new one, and the start of its pages, 0 for the first row."""
        assert len(layout.kv_lens_cpu) == self._num_rows and layout.page_indptr_cpu[0] == 0 and len(layout.pages) <= self.max_pages
        return (np.stack((layout.kv_lens_cpu.numpy(), layout.page_indptr_cpu.numpy()[:-1]), axis=1),)

    def run_fused(self, layer: int, heads: NewHeads) -> torch.Tensor:
        qkv_THK = heads.qkv_TX.unflatten(1, (-1, FUSED_HEAD_DIM))
        out_THK = qkv_THK.new_empty((len(qkv_THK), self._num_heads, FUSED_HEAD_DIM))
        keys, values = (pool.flatten(0, 1) for pool in self._pools[layer])
        self._kernel.run(
            qkv_THK, keys, values, *self._plans, self._pages, out_THK, self._page_size, *self._cluster, heads.q_weight_K, heads.k_weight_K,
            heads.eps, heads.cos_sin_TK, heads.slots_T,
        )  # fmt: skip
        return out_THK
