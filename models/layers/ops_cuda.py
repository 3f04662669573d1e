"""`Ops` for NVIDIA GPUs: FlashInfer's norms and activation, our Triton kernels, cuBLAS epilogues, cuDNN attention. Made by `make_ops`."""

import torch
import torch.nn.functional as F
from flashinfer.activation import silu_and_mul
from flashinfer.norm import fused_add_rmsnorm, rmsnorm
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.layers.kernels import norm_rope_store, rotate_vision_
from models.layers.ops import KVPool


class CudaOps:
    """See `Ops`. For bfloat16; tensors contiguous unless said otherwise there."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        normed_TD: torch.Tensor = rmsnorm(x_TD, weight_D, eps)
        return normed_TD

    def add_rms_norm_(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        fused_add_rmsnorm(x_TD, residual_TD, weight_D, eps)
        return x_TD

    def silu_and_mul(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        product_TI: torch.Tensor = silu_and_mul(gate_up_TI)
        return product_TI

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # GEMM, bias and tanh-GELU in one kernel. On CUDA this op's GELU is the tanh one, on a CPU it would be the exact one.
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        return torch.mm(x_SD, weight_VD.t(), out_dtype=torch.float32)

    def norm_rope_store_(
        self,
        qkv_TX: torch.Tensor,
        q_weight_K: torch.Tensor,
        k_weight_K: torch.Tensor,
        eps: float,
        cos_sin_TK: torch.Tensor,
        pool: KVPool,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        return norm_rope_store(qkv_TX, q_weight_K, k_weight_K, eps, cos_sin_TK, pool, slots_T)

    def rotate_vision_(self, qkv_BP3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> None:
        rotate_vision_(qkv_BP3HK, cos_sin_PK)

    def attend_dense(self, q_BHPK: torch.Tensor, k_BHPK: torch.Tensor, v_BHPK: torch.Tensor) -> torch.Tensor:
        # The fastest of torch's backends at head_dim 72 by far. It plans anew for each (B, P) that it has not seen.
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q_BHPK, k_BHPK, v_BHPK)
