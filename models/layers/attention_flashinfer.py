"""`AttentionBackend` on a GPU: FlashInfer's FA3 for chunks of prompts, our kernel for single tokens and for short chunks in a graph. Made
by `make_attention` for steps of any mix, and by the worker for the fixed shapes of its CUDA graphs.
"""

from collections.abc import Callable, Sequence

import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from models.batch import AttentionLayout
from models.layers.attention import AttentionBackend
from models.layers.kernels_attention import group_tokens
from models.layers.ops import KVPool
from models.layers.split_attention import SplitAttention, max_token_groups

WORKSPACE_BYTES = 1 << 20  # FA3 splits no row over blocks and leaves it untouched
MAX_SPLIT_TOKENS = 64  # of prompts in a step; FA3 would give a few tokens far into a prompt to one block per head


class PlanGuard:
    """A plan goes to the device through a pinned buffer of its wrapper: the next plan must not overwrite it before that copy is done."""

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()

    def __enter__(self) -> None:
        self._copied.synchronize()

    def __exit__(self, *_: object) -> None:
        self._copied.record()


class PrefillAttention:
    """FA3 over the prefill rows of a layout.

    With `num_rows`, exactly so many rows (some may be empty) whose tokens always sum to the same, at fixed addresses: then `run_into` can
    be captured in a CUDA graph.
    """

    def __init__(self, pools: Sequence[KVPool], num_heads: int, num_rows: int | None = None, pages: torch.Tensor | None = None) -> None:
        self._pools = pools
        k_pool = pools[0][0]
        _, self._page_size, kv_heads, head_dim = k_pool.shape
        self._sizes = num_heads, kv_heads, head_dim, self._page_size
        self._dtypes = {"q_data_type": k_pool.dtype, "kv_data_type": k_pool.dtype}  # FlashInfer's default would be float16
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=k_pool.device)
        fixed: dict[str, object] = {}
        if num_rows is not None:
            sizes = {"qo_indptr_buf": num_rows + 1, "paged_kv_indptr_buf": num_rows + 1, "paged_kv_last_page_len_buf": num_rows}
            fixed = {name: torch.zeros(size, dtype=torch.int32, device=k_pool.device) for name, size in sizes.items()}
            fixed |= {"use_cuda_graph": True, "paged_kv_indices_buf": pages}
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3", **fixed)
        self._guard = PlanGuard()

    def plan(self, layout: AttentionLayout) -> None:
        rows = layout.num_prefill_rows
        indptrs = layout.qo_indptr_cpu[: rows + 1], layout.page_indptr_cpu[: rows + 1]
        pages = layout.pages[: int(layout.page_indptr_cpu[rows])]
        last_page_len = (layout.kv_lens_cpu[:rows] - 1) % self._page_size + 1
        with self._guard:
            self._wrapper.plan(*indptrs, pages, last_page_len, *self._sizes, causal=True, **self._dtypes)

    def run_into(self, layer: int, q_THK: torch.Tensor, out_THK: torch.Tensor) -> None:
        """As `AttentionBackend.run`, for a result whose place is known."""
        self._wrapper.run(q_THK, self._pools[layer], out=out_THK)


class MixedAttention:
    """See `AttentionBackend`. The prefill rows, which come first, go to FA3 and the decode rows to our kernel."""

    def __init__(
        self, pools: Sequence[KVPool], prefill: PrefillAttention, make_decode: Callable[[AttentionLayout], SplitAttention]
    ) -> None:
        self._pools = pools
        self._prefill = prefill
        self._make_decode = make_decode
        self._decode: SplitAttention | None = None
        self._num_prefill_tokens = 0

    def plan(self, layout: AttentionLayout) -> None:
        self._num_prefill_tokens = int(layout.qo_indptr_cpu[layout.num_prefill_rows])
        if layout.num_prefill_rows:
            self._prefill.plan(layout)
        self._decode = None
        decodes = layout.decode_rows()
        if len(decodes.kv_lens_cpu):
            self._decode = self._make_decode(decodes)
            self._decode.plan(decodes)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        split = self._num_prefill_tokens
        if split:
            self._prefill.run_into(layer, q_THK[:split], out_THK[:split])
        if self._decode is not None:
            self._decode.run_into(layer, q_THK[split:], out_THK[split:])
        return out_THK


def make_mixed_attention(pools: Sequence[KVPool], num_heads: int) -> MixedAttention:
    """For steps of any mix, outside CUDA graphs."""

    def make_decode(decodes: AttentionLayout) -> SplitAttention:
        num_rows = len(decodes.kv_lens_cpu)
        return SplitAttention.factory(pools, num_heads, num_rows, len(decodes.pages))(num_rows)

    return MixedAttention(pools, PrefillAttention(pools, num_heads), make_decode)


def fixed_attention_factory(
    pools: Sequence[KVPool], num_heads: int, max_prefill_rows: int, max_decode_rows: int, max_blocks: int
) -> Callable[[int, int, int], AttentionBackend]:
    """Makes backends for (prompt tokens, decode rows, rows of the prompt tokens), for CUDA graphs that follow each other on one stream.

    `max_blocks` bounds the pages of one row. Those with equally many prompt tokens share FA3's plan.
    """
    kv_heads, device = pools[0][0].shape[2], pools[0][0].device
    size = group_tokens(num_heads, kv_heads)
    max_groups = max_decode_rows + max_token_groups(MAX_SPLIT_TOKENS, max_prefill_rows, size)
    make_split = SplitAttention.factory(pools, num_heads, max_groups, (max_prefill_rows + max_decode_rows) * max_blocks)
    pages = torch.zeros(max_prefill_rows * max_blocks, dtype=torch.int32, device=device)
    prefills: dict[int, PrefillAttention] = {}

    def make(num_tokens: int, num_decodes: int, num_rows: int) -> AttentionBackend:
        if num_tokens <= MAX_SPLIT_TOKENS:
            return make_split(num_decodes + max_token_groups(num_tokens, num_rows, size))
        if num_tokens not in prefills:
            prefills[num_tokens] = PrefillAttention(pools, num_heads, num_rows, pages)
        decode = make_split(num_decodes)
        return MixedAttention(pools, prefills[num_tokens], lambda decodes: decode)

    return make
