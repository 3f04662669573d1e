"""Attention on Hopper: one kernel for chunks of prompts, another for decode rows and short chunks, a third for a graph of one decode row.
In a mixed step the first two run concurrently on separate multiprocessors: one is compute-bound, the other memory-bound.

With keys and values in float8, chunks use a copy of their pages in bfloat16, or the kernel of `portable`, which converts what it reads."""

from collections.abc import Sequence

from models.cache.layout import AttentionLayout
from models.kernels.hopper.flash_decoding import Split, SplitKernel
from models.kernels.hopper.fused_decoding import FusedDecoding
from models.kernels.hopper.prefill_attention import Prefill, PrefillKernel
from models.kernels.hopper.tuned import MAX_SPLIT_TOKENS
from models.kernels.ops import KVPool
from models.kernels.paged import EagerAttention, MakeFixed, PagedAttention, Piece
from models.kernels.work_items import max_token_groups


def eager_attention(pools: Sequence[KVPool], num_heads: int, portable: EagerAttention | None = None) -> EagerAttention:
    """Return attention for any mix of rows, outside CUDA graphs. `portable` computes steps with too many pages to copy."""
    prefill, split = PrefillKernel(pools, num_heads), SplitKernel(pools, num_heads)

    def choose(layout: AttentionLayout) -> Sequence[Piece]:
        num_tokens, num_all = (int(layout.qo_indptr_cpu[row]) for row in (layout.num_prefill_rows, -1))
        num_short, num_pages = num_all - num_tokens, int(layout.page_indptr_cpu[layout.num_prefill_rows])
        if num_tokens <= MAX_SPLIT_TOKENS:
            return [Split(split, num_short + max_token_groups(num_tokens, layout.num_prefill_rows, split.group_tokens))]
        if portable is not None and num_pages > prefill.most_pages:
            return portable.choose(layout)
        return [Prefill(prefill, num_tokens, num_pages), *([Split(split, num_short, num_tokens)] if num_short else [])]

    return EagerAttention(pools, choose)


def fixed_attention_factory(pools: Sequence[KVPool], num_heads: int, max_rows: int, max_blocks: int, is_fusable: bool = True) -> MakeFixed:
    """See `Backend.fixed_attention`."""
    split = SplitKernel(pools, num_heads)
    split.reserve(max_rows)

    def make(num_rows: int) -> PagedAttention:
        if is_fusable and FusedDecoding.takes(pools, num_heads, num_rows):
            return FusedDecoding(pools, num_heads, num_rows, max_rows * max_blocks)
        return PagedAttention(pools, [Split(split, num_rows)], max_rows * max_blocks)

    return make
