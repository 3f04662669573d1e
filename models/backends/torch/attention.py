"""`AttentionBackend` in plain torch, row by row over gathered pages."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from models.backends.ops import KVPool
from models.batch import AttentionLayout


class TorchAttention:
    """See `AttentionBackend`."""

    def __init__(self, pools: Sequence[KVPool]) -> None:
        self._pools = pools
        self._page_size = pools[0][0].shape[1]
        self._rows: list[tuple[slice, int, torch.Tensor]] = []  # query tokens, cached tokens, pages

    def plan(self, layout: AttentionLayout) -> None:
        starts, lengths = layout.qo_indptr_cpu.tolist(), layout.kv_lens_cpu.tolist()
        pages = layout.page_indptr_cpu.tolist()
        self._rows = [
            (slice(starts[r], starts[r + 1]), length, layout.pages[pages[r] : pages[r + 1]].long()) for r, length in enumerate(lengths)
        ]

    def pool(self, layer: int) -> KVPool:
        return self._pools[layer]

    def run(self, layer: int, q_THK: torch.Tensor) -> torch.Tensor:
        k_pool, v_pool = self._pools[layer]
        out_THK = torch.empty_like(q_THK, memory_format=torch.contiguous_format)
        for tokens, length, pages in self._rows:
            # Half the time of `pool[pages]`, on CPUs
            k_1HSK = k_pool.index_select(0, pages).flatten(0, 1)[:length].transpose(0, 1)[None]
            v_1HSK = v_pool.index_select(0, pages).flatten(0, 1)[:length].transpose(0, 1)[None]
            q_1HTK = q_THK[tokens].transpose(0, 1)[None]
            count = q_1HTK.shape[2]
            mask_TS = None  # of the last token, which sees all
            if count > 1:
                mask_TS = torch.ones(count, length, dtype=torch.bool, device=q_THK.device).tril(diagonal=length - count)
            out = F.scaled_dot_product_attention(q_1HTK, k_1HSK, v_1HSK, attn_mask=mask_TS, enable_gqa=True)
            out_THK[tokens] = out[0].transpose(0, 1)
        return out_THK
