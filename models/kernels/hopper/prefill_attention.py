"""Attention of chunks of prompts: plans for `prefill_attention.cu`."""

from collections.abc import Sequence

import torch

from models.cache.layout import AttentionLayout
from models.kernels.heads import HOPPER_GROUPS
from models.kernels.hopper.compile import load_kernel
from models.kernels.hopper.mixed_plan import prefill_blocks
from models.kernels.hopper.tile_plan import part_memory, plan_items
from models.kernels.ops import FLOAT8, KVPool
from models.kernels.paged import Int32s
from models.kernels.triton.launch import num_multiprocessors
from models.kernels.triton.paged_attention import copy_pages
from models.kernels.work_items import token_groups

MIN_PAGE = 8
COPY_BYTES = 128 << 20  # of a layer's keys and values copied from float8


class PrefillKernel:
    """The kernel for these pools, with memory that its pieces share on one stream. ValueError for an unsupported page size.

    Pages in float8 are copied in bfloat16, up to `most_pages`."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int) -> None:
        k_pool = pools[0][0]
        _, self.page_size, self.kv_heads, head_dim = k_pool.shape
        assert num_heads % self.kv_heads == 0 and num_heads // self.kv_heads in HOPPER_GROUPS
        if self.page_size < MIN_PAGE or self.page_size & (self.page_size - 1):
            raise ValueError(f"the page size must be a power of two, at least {MIN_PAGE} tokens, got {self.page_size}")
        self.kernel, self.scale = load_kernel("prefill_attention", head_dim), head_dim**-0.5
        self.num_blocks = num_multiprocessors(k_pool.device)
        self.memory = part_memory(self.kernel, self.num_blocks, k_pool.device)
        self.pools, self.copies, self.most_pages = pools, list[KVPool](), 1 << 31
        if k_pool.dtype == FLOAT8:
            self.most_pages = COPY_BYTES // (4 * k_pool[0].numel())
            k_copy, v_copy = k_pool.new_empty((2, self.most_pages, *k_pool.shape[1:]), dtype=torch.bfloat16)
            self.copies, self.numbers = [(k_copy, v_copy)], torch.arange(self.most_pages, dtype=torch.int32, device=k_pool.device)
        self.slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in self.copies * len(pools) or pools]
        self.tile_tokens, self.tile_keys = self.kernel.tile_rows() // (num_heads // self.kv_heads), self.kernel.tile_keys()


class Prefill:
    """See `Piece`: the prefill rows, which are the first `num_tokens` and have the first `num_pages`, or all. Values in their pages must be
    finite, even after a row's last key, since they are multiplied by 0."""

    def __init__(self, of: PrefillKernel, num_tokens: int, num_pages: int | None = None) -> None:
        self._of, self._num_tokens, self._num_pages = of, num_tokens, num_pages

    def plan(self, layout: AttentionLayout, before: Sequence[Int32s]) -> Int32s:
        """See `plan_items`; uses the multiprocessors that the layout's decode rows leave."""
        of = self._of
        tiles = token_groups(layout.prefill_rows(), of.tile_tokens)
        num_blocks = prefill_blocks(layout, tiles, of.kv_heads, of.tile_keys, of.num_blocks)
        return plan_items(tiles, of.kv_heads, of.tile_keys, num_blocks)

    def launch(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor) -> None:
        of, own = self._of, slice(self._num_tokens)
        for copies in of.copies:
            copy_pages(of.pools[layer], copies, pages[: self._num_pages])
            pages = of.numbers
        of.kernel.run(q_THK[own], *of.slots[layer], out_THK[own], plan, *of.memory, pages, of.page_size, of.num_blocks, of.scale)
