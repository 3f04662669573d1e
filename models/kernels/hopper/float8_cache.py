"""Attention over keys and values in float8 on Hopper. Decode rows and short chunks read them in `flash_decoding.cu`. Longer chunks outside
graphs use `prefill_attention.cu` on a copy of their pages in bfloat16. Others use the kernel of `portable`, which converts what it
reads."""

from collections.abc import Sequence

import torch

from models.cache.layout import AttentionLayout
from models.kernels.hopper.flash_decoding import Split, SplitKernel
from models.kernels.hopper.prefill_attention import Prefill, PrefillKernel
from models.kernels.hopper.tuned import MAX_SPLIT_TOKENS
from models.kernels.ops import KVPool
from models.kernels.paged import EagerAttention, PagedAttention, Piece
from models.kernels.triton import paged_attention
from models.kernels.triton.paged_attention import copy_pages
from models.kernels.triton.tuned import AttentionTiles
from models.kernels.work_items import max_token_groups

COPY_BYTES = 128 << 20  # of a layer's copied keys and values


class CopyKernel:
    """The prefill kernel on copies of pages of these pools."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int) -> None:
        self.pools, k_pool = pools, pools[0][0]
        self.most_pages = COPY_BYTES // (4 * k_pool[0].numel())
        self._copies = k_pool.new_empty((2, self.most_pages, *k_pool.shape[1:]), dtype=torch.bfloat16)
        self.kernel = PrefillKernel([(self._copies[0], self._copies[1])], num_heads)
        self.numbers = torch.arange(self.most_pages, dtype=torch.int32, device=k_pool.device)

    def copy(self, layer: int, pages: torch.Tensor) -> None:
        copy_pages(self.pools[layer], (self._copies[0], self._copies[1]), pages)


class CopiedPrefill(Prefill):
    """See `Prefill`, for rows with the first `num_pages` pages."""

    def __init__(self, of: CopyKernel, num_tokens: int, num_pages: int) -> None:
        super().__init__(of.kernel, num_tokens)
        self._copies, self._num_pages = of, num_pages

    def launch(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor) -> None:
        self._copies.copy(layer, pages[: self._num_pages])
        super().launch(0, q_THK, out_THK, plan, self._copies.numbers)


def eager_attention(pools: Sequence[KVPool], num_heads: int, tiles: AttentionTiles) -> EagerAttention:
    """Return attention for any mix of rows, outside CUDA graphs."""
    copies, split = CopyKernel(pools, num_heads), SplitKernel(pools, num_heads)
    portable = paged_attention.eager_attention(pools, num_heads, tiles)

    def make(layout: AttentionLayout) -> PagedAttention:
        num_tokens, num_pages = (int(each[layout.num_prefill_rows]) for each in (layout.qo_indptr_cpu, layout.page_indptr_cpu))
        num_short = int(layout.qo_indptr_cpu[-1]) - num_tokens
        if num_tokens > MAX_SPLIT_TOKENS and num_pages > copies.most_pages:
            return portable.make(layout)
        pieces: list[Piece] = []
        if num_tokens <= MAX_SPLIT_TOKENS:
            pieces = [Split(split, num_short + max_token_groups(num_tokens, layout.num_prefill_rows, split.group_tokens))]
        else:
            pieces = [CopiedPrefill(copies, num_tokens, num_pages), *([Split(split, num_short, num_tokens)] if num_short else [])]
        return PagedAttention(pools, pieces, len(layout.pages))

    return EagerAttention(pools, make)
