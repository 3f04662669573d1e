"""`SegmentAttention` on FlashInfer's FA3, whose heads have 128 values. Made by `make_segment_attention`.

Only the queries are filled up with zeros: whatever follows a key in memory is then multiplied by zero, and whatever follows a value ends
in columns of the output that are dropped. So keys and values are read where the projection wrote them, as heads that overlap.
"""

from collections.abc import Sequence

import torch
from flashinfer.prefill import BatchPrefillWithRaggedKVCacheWrapper

from models.layers.attention_flashinfer import WORKSPACE_BYTES, PlanGuard
from models.layers.kernels_vision import rotate_and_pad_, trim_heads

PADDED = 128


class FlashInferSegments:
    """See `SegmentAttention`. Any mix of lengths is one launch; nothing is compiled or searched for a new length."""

    def __init__(self, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._num_heads = num_heads
        self._scale = head_dim**-0.5
        self._dtype = dtype
        workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._prefill = BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD", backend="fa3")
        self._guard = PlanGuard()

    def plan(self, lengths: Sequence[int]) -> None:
        indptr = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        heads, dtypes = (self._num_heads, self._num_heads, PADDED), {"q_data_type": self._dtype, "kv_data_type": self._dtype}
        with self._guard:
            self._prefill.plan(indptr, indptr, *heads, causal=False, sm_scale=self._scale, **dtypes)

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        num_patches, _, num_heads, head_dim = kvq_P3HK.shape
        q_PHL = rotate_and_pad_(kvq_P3HK, cos_sin_PK, PADDED)
        size, strides = (num_patches, num_heads, PADDED), (3 * num_heads * head_dim, head_dim, 1)
        k_start = kvq_P3HK.storage_offset()
        v_start = k_start + num_heads * head_dim
        k_PHL, v_PHL = kvq_P3HK.as_strided(size, strides, k_start), kvq_P3HK.as_strided(size, strides, v_start)  # ends inside the queries
        return trim_heads(self._prefill.run(q_PHL, k_PHL, v_PHL), head_dim)
