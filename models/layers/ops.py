"""The few operations that have one implementation per device, behind one Protocol; chosen once, when the model is built.

`ops_torch` is plain torch: the reference, the CPU, the tests. `ops_cuda` is FlashInfer and Triton.
"""

from typing import Protocol

import torch

KVPool = tuple[torch.Tensor, torch.Tensor]  # k and v, each (num_blocks, page_size, KV heads, K), contiguous


class Ops(Protocol):
    """Methods that end in an underscore change an argument in place, as said there."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """x / sqrt(mean(x ** 2) + eps) * weight, over the last dimension."""

    def add_rms_norm_(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        """residual += x, then the norm of the residual. `residual_TD` changes; `x_TD` may be overwritten."""

    def silu_and_mul(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        """silu(first half) * second half of the last dimension."""

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """gelu_tanh(x @ weight.T + bias) for x of two dimensions."""

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        """x @ weight.T in float32, whatever the inputs: rounded logits would tie."""

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
        """RMSNorm and rotation of every query and key head, then keys and values into the pool. Returns the queries (T, H, K).

        `qkv_TX` is (T, (H + 2 * KV heads) * K) and may be overwritten; `cos_sin_TK` is float32, K / 2 cosines then K / 2 sines; token t
        is written to `pool` at block * page_size + offset = `slots_T[t]`.
        """

    def rotate_vision_(self, qkv_BP3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> None:
        """Rotates queries and keys (index 0 and 1 of the third dimension) in place; tables as above, one row per patch."""

    def attend_dense(self, q_BHPK: torch.Tensor, k_BHPK: torch.Tensor, v_BHPK: torch.Tensor) -> torch.Tensor:
        """Full attention inside each of the B sequences; (B, H, P, K). Inputs may be strided."""


def make_ops(device: torch.device) -> Ops:
    """The implementation for this device."""
    if device.type == "cuda":
        from models.layers.ops_cuda import CudaOps  # needs FlashInfer and Triton, which a CPU machine lacks

        return CudaOps()
    from models.layers.ops_torch import TorchOps

    return TorchOps()
