"""Attention of chunks of prompts: plans for `prefill_attention.cu`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from models.cache.layout import AttentionLayout
from models.kernels.heads import HOPPER_GROUPS
from models.kernels.hopper.compile import load_kernel
from models.kernels.hopper.mixed_plan import prefill_blocks
from models.kernels.hopper.tile_plan import ITEM_FIELDS, PartMemory, max_items, plan_items
from models.kernels.ops import KVPool
from models.kernels.paged import Int32s
from models.kernels.triton.launch import num_multiprocessors
from models.kernels.units import max_token_groups, token_groups

MIN_PAGE = 8


class PrefillAttention:
    """The prefill rows of a layout. Values in their pages must be finite, also behind a row's last key: those count times 0.

    With `num_tokens`, for at most so many tokens in `num_rows` rows (some may be empty): the plan has one size, for a CUDA graph.
    """

    def __init__(
        self, pools: Sequence[KVPool], kernel: Any, memory: PartMemory, num_heads: int, num_tokens: int | None = None, num_rows: int = 0
    ) -> None:
        k_pool = pools[0][0]
        _, self._page_size, self._kv_heads, head_dim = k_pool.shape
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in pools]
        self._scale = head_dim**-0.5
        self._kernel, self._memory = kernel, memory
        self._tile_tokens, self._tile_keys = kernel.tile_rows() // (num_heads // self._kv_heads), kernel.tile_keys()
        self._num_blocks = num_multiprocessors(k_pool.device)
        num_tiles = None if num_tokens is None else max_token_groups(num_tokens, num_rows, self._tile_tokens)
        self._max_items = None if num_tiles is None else max_items(num_tiles, self._kv_heads, self._num_blocks)
        self._items = torch.zeros((1, ITEM_FIELDS), dtype=torch.int32, device=k_pool.device)
        self._pages = self._items[0:0, 0]

    @classmethod
    def factory(cls, pools: Sequence[KVPool], num_heads: int) -> Callable[..., "PrefillAttention"]:
        """Makes backends by `num_tokens` and `num_rows` that share memory on one stream. ValueError for
        pages that the kernel does not know."""
        k_pool = pools[0][0]
        _, page_size, kv_heads, head_dim = k_pool.shape
        assert num_heads % kv_heads == 0 and num_heads // kv_heads in HOPPER_GROUPS and k_pool.dtype == torch.bfloat16
        if page_size < MIN_PAGE or page_size & (page_size - 1):
            raise ValueError(f"attention wants pages of a power of two, at least {MIN_PAGE} tokens: {page_size}")
        kernel = load_kernel("prefill_attention", head_dim)
        memory = PartMemory.allocate(kernel, num_multiprocessors(k_pool.device), k_pool.device)
        return partial(cls, pools, kernel, memory, num_heads)

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s]:
        """The items of the layout's prefill rows, see `plan_items`, for as many multiprocessors as its decode rows leave."""
        tiles = token_groups(layout.prefill_rows(), self._tile_tokens)
        num_blocks = prefill_blocks(layout, tiles, self._kv_heads, self._tile_keys, self._num_blocks)
        items = plan_items(tiles, self._kv_heads, self._tile_keys, num_blocks)
        if self._max_items is None:
            return (items,)
        padded = np.zeros((1 + self._max_items, ITEM_FIELDS), dtype=np.int32)
        padded[: len(items)] = items
        return (padded,)

    def read_from(self, plan: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        (self._items,) = plan
        self._pages = pages

    def run_into(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor) -> None:
        keys, values = self._slots[layer]
        plan = self._items, self._memory.parts, self._memory.arrivals, self._pages
        self._kernel.run(q_THK, keys, values, out_THK, *plan, self._page_size, self._num_blocks, self._scale)
