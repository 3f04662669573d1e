"""`AttentionBackend` for steps of any mix: FlashInfer's FA3 for prompt chunks, our decode for single tokens. Made by `make_attention`."""

from collections.abc import Sequence

import torch
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from models.batch import AttentionLayout
from models.layers.decode_attention import DecodeAttention
from models.layers.ops import KVPool

WORKSPACE_BYTES = 1 << 20  # FA3 splits no row over blocks and leaves it untouched


class PlanGuard:
    """A plan goes to the device through a pinned buffer of its wrapper: the next plan must not overwrite it before that copy is done."""

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()

    def __enter__(self) -> None:
        self._copied.synchronize()

    def __exit__(self, *_: object) -> None:
        self._copied.record()


class FlashInferAttention:
    """See `AttentionBackend`. The first `num_prefill_rows` rows go to FA3, the others to `DecodeAttention`."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int) -> None:
        self._pools = pools
        k_pool = pools[0][0]
        _, self._page_size, kv_heads, head_dim = k_pool.shape
        self._sizes = num_heads, kv_heads, head_dim, self._page_size
        self._dtypes = {"q_data_type": k_pool.dtype, "kv_data_type": k_pool.dtype}  # FlashInfer's default would be float16
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=k_pool.device)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._guard = PlanGuard()
        self._num_prefill_tokens = 0
        self._decode: DecodeAttention | None = None  # made anew for the decode rows of each step

    def plan(self, layout: AttentionLayout) -> None:
        rows, num_decodes = layout.num_prefill_rows, len(layout.kv_lens_cpu) - layout.num_prefill_rows
        num_prefill_pages, num_pages = int(layout.page_indptr_cpu[rows]), int(layout.page_indptr_cpu[-1])
        self._num_prefill_tokens = int(layout.qo_indptr_cpu[rows])
        if rows:
            indptrs = layout.qo_indptr_cpu[: rows + 1], layout.page_indptr_cpu[: rows + 1]
            last_page_len = (layout.kv_lens_cpu[:rows] - 1) % self._page_size + 1
            with self._guard:
                self._prefill.plan(*indptrs, layout.pages[:num_prefill_pages], last_page_len, *self._sizes, causal=True, **self._dtypes)
        self._decode = None
        if num_decodes:
            self._decode = DecodeAttention.factory(self._pools, self._sizes[0], num_decodes, num_pages - num_prefill_pages)(num_decodes)
            self._decode.plan(layout)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        split = self._num_prefill_tokens
        if split:
            self._prefill.run(q_THK[:split], self._pools[layer], out=out_THK[:split])
        if self._decode is not None:
            self._decode.run_into(layer, q_THK[split:], out_THK[split:])
        return out_THK
