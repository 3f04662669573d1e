"""`AttentionBackend` on a GPU: one kernel for chunks of prompts, another for single tokens and for short chunks in a graph, a third for a
graph of very few single tokens. Made by `make_attention` for steps of any mix, and by the worker for the fixed shapes of its CUDA graphs.

In a mixed step both run at once, on multiprocessors of their own: one multiplies, the other waits for memory.
"""

from collections.abc import Callable, Sequence

import torch

from models.attention.paged import FixedAttention, Int32s, on_device, plan_on_device
from models.attention.units import group_tokens, max_token_groups
from models.backends.hopper.flash_decoding import FlashDecoding
from models.backends.hopper.fused_decoding import FusedDecoding
from models.backends.hopper.prefill_attention import PrefillAttention
from models.backends.hopper.tile_plan import num_blocks_of
from models.backends.hopper.tuned import MAX_SPLIT_TOKENS
from models.backends.ops import KVPool
from models.batch import AttentionLayout


class MixedAttention:
    """See `AttentionBackend`. The prefill rows, which come first, go to one kernel and the decode rows to the other."""

    def __init__(
        self, pools: Sequence[KVPool], prefill: PrefillAttention, make_decode: Callable[[AttentionLayout], FlashDecoding]
    ) -> None:
        self._pools = pools
        self._prefill = prefill
        self._make_decode = make_decode
        self._decode: FlashDecoding | None = None
        self._num_prefill_tokens = 0

    def plan(self, layout: AttentionLayout) -> None:
        device, decodes = layout.pages.device, layout.decode_rows()
        self._num_prefill_tokens = int(layout.qo_indptr_cpu[layout.num_prefill_rows])
        num_taken = 0
        if self._num_prefill_tokens:
            (items,) = self._prefill.plan_arrays(layout)
            self._prefill.read_from(on_device((items,), device), layout.pages)
            num_taken = num_blocks_of(items)
        self._decode = None
        if len(decodes.kv_lens_cpu):
            self._decode = self._make_decode(decodes)
            self._decode.read_from(on_device(self._decode.plan_arrays(decodes, num_taken=num_taken), device), decodes.pages)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        split = self._num_prefill_tokens
        if split:
            self._prefill.run_into(layer, q_THK[:split], out_THK[:split])
        if self._decode is not None:
            self._decode.run_into(layer, q_THK[split:], out_THK[split:], is_beside=split > 0)
        return out_THK


class FixedMixedAttention:
    """See `FixedAttention`, for `num_tokens` of prompts and then decode rows, if there are any."""

    def __init__(
        self, pools: Sequence[KVPool], num_tokens: int, max_pages: int, prefill: PrefillAttention, decode: FlashDecoding | None
    ) -> None:
        self.max_pages = max_pages
        self._pools = pools
        self._num_tokens = num_tokens
        self._prefill = prefill
        self._decode = decode

    def plan(self, layout: AttentionLayout) -> None:
        plan_on_device(self, layout)

    def plan_arrays(self, layout: AttentionLayout) -> tuple[Int32s, ...]:
        (items,) = self._prefill.plan_arrays(layout)
        if self._decode is None:
            return (items,)
        first_page = int(layout.page_indptr_cpu[layout.num_prefill_rows])  # of the decode rows, in the one list that both kernels read
        return items, *self._decode.plan_arrays(layout.decode_rows(), first_page, num_blocks_of(items))

    def read_from(self, plan: Sequence[torch.Tensor], pages: torch.Tensor) -> None:
        items, *units = plan
        self._prefill.read_from((items,), pages)
        if self._decode is not None:
            self._decode.read_from(units, pages)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK, split = torch.empty_like(q_THK), self._num_tokens
        self._prefill.run_into(layer, q_THK[:split], out_THK[:split])
        if self._decode is not None:
            self._decode.run_into(layer, q_THK[split:], out_THK[split:], is_beside=True)
        return out_THK


def make_mixed_attention(pools: Sequence[KVPool], num_heads: int) -> MixedAttention:
    """For steps of any mix, outside CUDA graphs."""

    def make_decode(decodes: AttentionLayout) -> FlashDecoding:
        num_rows = len(decodes.kv_lens_cpu)
        return FlashDecoding.factory(pools, num_heads, num_rows, len(decodes.pages))(num_rows)

    return MixedAttention(pools, PrefillAttention.factory(pools, num_heads)(), make_decode)


def fixed_attention_factory(
    pools: Sequence[KVPool], num_heads: int, max_prefill_rows: int, max_decode_rows: int, max_blocks: int
) -> Callable[[int, int, int], FixedAttention]:
    """Makes backends for (prompt tokens, decode rows, rows of the prompt tokens), for CUDA graphs that follow each other on one stream.

    `max_blocks` bounds the pages of one row.
    """
    size = group_tokens(num_heads, pools[0][0].shape[2])
    max_groups = max_decode_rows + max_token_groups(MAX_SPLIT_TOKENS, max_prefill_rows, size)
    max_pages = (max_prefill_rows + max_decode_rows) * max_blocks
    make_split = FlashDecoding.factory(pools, num_heads, max_groups, max_pages)
    make_prefill = PrefillAttention.factory(pools, num_heads)

    def make(num_tokens: int, num_decodes: int, num_rows: int) -> FixedAttention:
        if num_tokens == 0 and FusedDecoding.takes(pools, num_heads, num_decodes):
            return FusedDecoding(pools, num_heads, num_decodes, max_pages)
        if num_tokens <= MAX_SPLIT_TOKENS:
            return make_split(num_decodes + max_token_groups(num_tokens, num_rows, size))
        decode = make_split(num_decodes) if num_decodes else None
        return FixedMixedAttention(pools, num_tokens, max_pages, make_prefill(num_tokens, num_rows), decode)

    return make
