"""`portable` with attention on our CUDA kernels and cuBLAS's float8."""

from collections.abc import Sequence

import torch

from models.kernels.heads import Heads, hopper_takes
from models.kernels.hopper.attention import eager_attention, fixed_attention_factory
from models.kernels.hopper.compile import NO_HEADS, load_kernels
from models.kernels.hopper.few_rows import HopperOps
from models.kernels.hopper.varlen_attention import HopperVarlen
from models.kernels.ops import FLOAT8, KVPool, Ops
from models.kernels.paged import EagerAttention, MakeFixed
from models.kernels.triton.backend import PortableBackend
from models.kernels.varlen import VarlenAttention

FLOAT8_HEAD_DIM = 128  # of a cache in float8


def takes(pools: Sequence[KVPool], num_heads: int) -> bool:
    """Return whether our CUDA kernels support these heads."""
    (_, _, num_kv, head_dim), dtype = pools[0][0].shape, pools[0][0].dtype
    has_kernel = dtype == torch.bfloat16 or (dtype == FLOAT8 and head_dim == FLOAT8_HEAD_DIM)
    return has_kernel and hopper_takes(Heads(num_heads, num_kv, head_dim, head_dim))


class HopperBackend(PortableBackend):
    """See `Backend`."""

    name = "hopper"
    ops: Ops = HopperOps()

    def load(self, heads: Heads, vision_head_dim: int) -> None:
        load_kernels(heads.dim if hopper_takes(heads) else NO_HEADS, vision_head_dim)

    def attention(self, pools: Sequence[KVPool], num_heads: int) -> EagerAttention:
        if not takes(pools, num_heads):
            return super().attention(pools, num_heads)
        return eager_attention(pools, num_heads, super().attention(pools, num_heads))

    def fixed_attention(
        self, pools: Sequence[KVPool], num_heads: int, max_rows: int, max_blocks: int, is_fusable: bool = True
    ) -> MakeFixed | None:
        if not takes(pools, num_heads):
            return super().fixed_attention(pools, num_heads, max_rows, max_blocks)
        return fixed_attention_factory(pools, num_heads, max_rows, max_blocks, is_fusable and pools[0][0].dtype != FLOAT8)

    def varlen_attention(self, num_heads: int, head_dim: int) -> VarlenAttention:
        return HopperVarlen(num_heads, head_dim, self.device)
