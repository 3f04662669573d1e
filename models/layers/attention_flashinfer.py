"""`AttentionBackend` on FlashInfer: FA3 for prompt chunks, tensor-core decode for single tokens, and a fixed-size decode for CUDA graphs.

Made by `make_attention` and, for graphs, by the worker through `GraphedDecode.factory`.
"""

from collections.abc import Callable, Sequence

import torch
from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper

from models.batch import AttentionLayout
from models.layers.ops import KVPool

WORKSPACE_BYTES = 256 << 20  # partial results of rows that are split over many blocks


class _Shape:
    """What every plan repeats: head counts, page size, dtype (FlashInfer's default would be float16)."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int) -> None:
        k_pool = pools[0][0]
        _, self.page_size, kv_heads, head_dim = k_pool.shape
        self.sizes = (num_heads, kv_heads, head_dim, self.page_size)
        self.dtypes = {"q_data_type": k_pool.dtype, "kv_data_type": k_pool.dtype}
        self.device = k_pool.device

    def last_page_len(self, kv_lens_cpu: torch.Tensor) -> torch.Tensor:
        """How many tokens each row has in its last page, 1 to page_size."""
        return (kv_lens_cpu - 1) % self.page_size + 1


class PlanGuard:
    """A plan goes to the device through a pinned buffer of its wrapper: the next plan must not overwrite it before that copy is done."""

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()

    def __enter__(self) -> None:
        self._copied.synchronize()

    def __exit__(self, *_: object) -> None:
        self._copied.record()


class FlashInferAttention:
    """See `AttentionBackend`. Steps of any mix of rows; the first `num_prefill_rows` go to FA3, the others to decode."""

    def __init__(self, pools: Sequence[KVPool], num_heads: int) -> None:
        self._pools = pools
        self._shape = _Shape(pools, num_heads)
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=self._shape.device)
        self._prefill = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._decode = BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        self._guard = PlanGuard()
        self._num_prefill_tokens = 0
        self._num_tokens = 0

    def plan(self, layout: AttentionLayout) -> None:
        rows = layout.num_prefill_rows
        num_rows = len(layout.kv_lens_cpu)
        last_page_len = self._shape.last_page_len(layout.kv_lens_cpu)
        num_prefill_pages = int(layout.page_indptr_cpu[rows])
        self._num_prefill_tokens, self._num_tokens = int(layout.qo_indptr_cpu[rows]), int(layout.qo_indptr_cpu[-1])
        with self._guard:
            if rows:
                indptrs = layout.qo_indptr_cpu[: rows + 1], layout.page_indptr_cpu[: rows + 1]
                pages = layout.pages[:num_prefill_pages]
                self._prefill.plan(*indptrs, pages, last_page_len[:rows], *self._shape.sizes, causal=True, **self._shape.dtypes)
            if rows < num_rows:
                indptr = layout.page_indptr_cpu[rows:] - num_prefill_pages
                pages = layout.pages[num_prefill_pages:]
                self._decode.plan(indptr, pages, last_page_len[rows:], *self._shape.sizes, **self._shape.dtypes)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        split = self._num_prefill_tokens
        if split:
            self._prefill.run(q_THK[:split], self._pools[layer], out=out_THK[:split])
        if split < self._num_tokens:
            self._decode.run(q_THK[split:], self._pools[layer], out=out_THK[split:])
        return out_THK


class GraphedDecode:
    """See `AttentionBackend`. Exactly `batch_size` decode rows at fixed addresses, so that `run` can be captured in a CUDA graph.

    `plan` stays outside the graph and is called before each replay. Planning is for the captured size whatever the lengths of the rows.
    """

    def __init__(self, pools: Sequence[KVPool], num_heads: int, batch_size: int, workspace: torch.Tensor, pages: torch.Tensor) -> None:
        self._pools = pools
        self._shape = _Shape(pools, num_heads)
        device = self._shape.device
        self._decode = BatchDecodeWithPagedKVCacheWrapper(
            workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=torch.zeros(batch_size + 1, dtype=torch.int32, device=device),
            paged_kv_indices_buffer=pages,
            paged_kv_last_page_len_buffer=torch.zeros(batch_size, dtype=torch.int32, device=device),
        )
        self._guard = PlanGuard()

    @classmethod
    def factory(cls, pools: Sequence[KVPool], num_heads: int, max_pages: int) -> Callable[[int], "GraphedDecode"]:
        """Makes backends by batch size that share one workspace and one page list: replays follow each other on one stream.

        `max_pages` bounds the pages of all rows of a step together; a page that several rows share counts for each of them.
        """
        device = pools[0][0].device
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        pages = torch.zeros(max_pages, dtype=torch.int32, device=device)
        return lambda batch_size: cls(pools, num_heads, batch_size, workspace, pages)

    def plan(self, layout: AttentionLayout) -> None:
        last_page_len = self._shape.last_page_len(layout.kv_lens_cpu)
        with self._guard:
            self._decode.plan(layout.page_indptr_cpu, layout.pages, last_page_len, *self._shape.sizes, **self._shape.dtypes)

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        out_THK = torch.empty_like(q_THK)
        self._decode.run(q_THK, self._pools[layer], out=out_THK)
        return out_THK
