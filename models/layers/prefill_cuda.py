"""Attention of chunks of prompts on a kernel of our own for Hopper, `prefill_attention.cu`. Used by `attention_cuda`."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from models.batch import AttentionLayout
from models.layers.attention import Int32s
from models.layers.compile_cuda import load_kernel
from models.layers.kernels_text import num_multiprocessors
from models.layers.mixed_plan import prefill_blocks
from models.layers.ops import KVPool
from models.layers.prefill_plan import ITEM_FIELDS, max_items, plan_items

GROUPS = (1, 2, 4, 8, 16)  # query heads that share a KV head: they share a tile's rows without a rest
MIN_PAGE = 8


class Kernel(Protocol):
    """What `prefill_attention.cu` exports."""

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        items: torch.Tensor,
        pages: torch.Tensor,
        page_size: int,
        num_blocks: int,
        scale: float,
    ) -> None:
        """q, out (T, H, K), k, v (slots, KV heads, K) without gaps. items: see `plan_items`."""

    def tile_rows(self) -> int:
        """Rows of a tile: its tokens times the query heads of a KV head."""

    def tile_keys(self) -> int:
        """Keys of a tile."""


class PrefillAttention:
    """The prefill rows of a layout. Values in their pages must be finite, also behind a row's last key: those count times 0.

    With `num_tokens`, for at most so many tokens in at most `num_rows` rows (some may be empty): then the plan has one size, and `run_into`
    can be captured in a CUDA graph that reads it from where `read_from` says.
    """

    def __init__(self, pools: Sequence[KVPool], num_heads: int, num_tokens: int | None = None, num_rows: int = 0) -> None:
        """ValueError for a number of heads, a page size or a type of values that the kernel does not know."""
        k_pool = pools[0][0]
        _, self._page_size, self._kv_heads, head_dim = k_pool.shape
        group = num_heads // self._kv_heads
        if group not in GROUPS or num_heads % self._kv_heads or k_pool.dtype != torch.bfloat16:
            heads = f"{num_heads} on {self._kv_heads} of {k_pool.dtype}"
            raise ValueError(f"attention wants KV heads of bfloat16, each with {GROUPS} query heads, not {heads}")
        if self._page_size < MIN_PAGE or self._page_size & (self._page_size - 1):
            raise ValueError(f"attention wants pages of a power of two, at least {MIN_PAGE} tokens: {self._page_size}")
        self._slots = [(k.flatten(0, 1), v.flatten(0, 1)) for k, v in pools]
        self._scale = head_dim**-0.5
        self._kernel: Kernel = load_kernel("prefill_attention", head_dim)
        self._tile_tokens, self._tile_keys = self._kernel.tile_rows() // group, self._kernel.tile_keys()
        self._num_blocks = num_multiprocessors(k_pool.device)
        self._max_items = None if num_tokens is None else max_items(num_tokens, num_rows, self._kv_heads, self._tile_tokens)
        self._items = torch.zeros((1, ITEM_FIELDS), dtype=torch.int32, device=k_pool.device)
        self._pages = self._items[0:0, 0]

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s]:
        """The items of the layout's prefill rows, see `plan_items`, for as many multiprocessors as its decode rows leave."""
        tiling = self._kv_heads, self._tile_tokens, self._tile_keys
        items = plan_items(layout.prefill_rows(), *tiling, prefill_blocks(layout, *tiling, self._num_blocks))
        if self._max_items is None:
            return (items,)
        padded = np.zeros((1 + self._max_items, ITEM_FIELDS), dtype=np.int32)
        padded[: len(items)] = items
        return (padded,)

    def read_from(self, plan: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        (self._items,) = plan
        self._pages = pages

    def run_into(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor) -> None:
        """As `AttentionBackend.run`, for a result whose place is known."""
        keys, values = self._slots[layer]
        self._kernel.run(q_THK, keys, values, out_THK, self._items, self._pages, self._page_size, self._num_blocks, self._scale)
