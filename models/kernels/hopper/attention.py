"""`AttentionBackend` on Hopper: one kernel for chunks of prompts, another for decode rows and short chunks, a third for a graph of one
decode row. In a mixed step the first two run at once, each on multiprocessors of its own: one multiplies, the other waits for memory."""

from collections.abc import Callable, Sequence

import torch

from models.cache.layout import AttentionLayout
from models.kernels.hopper.flash_decoding import FlashDecoding
from models.kernels.hopper.fused_decoding import FusedDecoding
from models.kernels.hopper.prefill_attention import PrefillAttention
from models.kernels.hopper.tile_plan import num_blocks_of
from models.kernels.hopper.tuned import MAX_SPLIT_TOKENS
from models.kernels.ops import KVPool
from models.kernels.paged import FixedAttention, Int32s, plan_on_device
from models.kernels.units import group_tokens, max_token_groups


class MixedAttention:
    """See `FixedAttention`, for `num_tokens` of prompts, then decode rows."""

    def __init__(
        self, pools: Sequence[KVPool], num_tokens: int, max_pages: int, prefill: PrefillAttention, decode: FlashDecoding | None
    ) -> None:
        self.max_pages = max_pages
        self._pools = pools
        self._num_tokens = num_tokens
        self._prefill, self._decode = prefill, decode

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
        if split:
            self._prefill.run_into(layer, q_THK[:split], out_THK[:split])
        if self._decode is not None:
            self._decode.run_into(layer, q_THK[split:], out_THK[split:], is_beside=True)
        return out_THK


class EagerAttention:
    """See `AttentionBackend`: for steps of any mix, outside CUDA graphs."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int) -> None:
        self._pools, self._num_heads = pools, num_heads
        self._prefill = PrefillAttention.factory(pools, num_heads)()
        self._planned: MixedAttention | FlashDecoding | None = None

    def plan(self, layout: AttentionLayout) -> None:
        num_tokens, max_pages, decode = int(layout.qo_indptr_cpu[layout.num_prefill_rows]), len(layout.pages), None
        if num_short := int(layout.qo_indptr_cpu[-1]) - num_tokens:
            decode = FlashDecoding.factory(self._pools, self._num_heads, num_short, max_pages)(num_short)
        is_mixed = num_tokens or decode is None
        self._planned = MixedAttention(self._pools, num_tokens, max_pages, self._prefill, decode) if is_mixed else decode
        assert self._planned is not None
        self._planned.plan(layout)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        assert self._planned is not None
        return self._planned.run(layer, q_THK)


def fixed_attention_factory(
    pools: Sequence[KVPool], num_heads: int, max_prefill_rows: int, max_decode_rows: int, max_blocks: int, has_norms: bool = True
) -> Callable[[int, int, int], FixedAttention]:
    """See `Backend.fixed_attention`."""
    size = group_tokens(num_heads, pools[0][0].shape[2])
    max_groups = max_decode_rows + max_token_groups(MAX_SPLIT_TOKENS, max_prefill_rows, size)
    max_pages = (max_prefill_rows + max_decode_rows) * max_blocks
    make_split = FlashDecoding.factory(pools, num_heads, max_groups, max_pages)
    make_prefill = PrefillAttention.factory(pools, num_heads)

    def make(num_tokens: int, num_decodes: int, num_rows: int) -> FixedAttention:
        if num_tokens == 0 and has_norms and FusedDecoding.takes(pools, num_heads, num_decodes):
            return FusedDecoding(pools, num_heads, num_decodes, max_pages)
        if num_tokens <= MAX_SPLIT_TOKENS:
            return make_split(num_decodes + max_token_groups(num_tokens, num_rows, size))
        decode = make_split(num_decodes) if num_decodes else None
        return MixedAttention(pools, num_tokens, max_pages, make_prefill(num_tokens, num_rows), decode)

    return make
