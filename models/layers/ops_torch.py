"""`Ops` in plain torch: what every other implementation is compared to. Used on the CPU and by tests."""

import torch
import torch.nn.functional as F

from models.layers.ops import KVPool


class TorchOps:
    """See `Ops`. Arithmetic is float32 inside, results have the input's dtype."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        x = x_TD.float()
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight_D).to(x_TD.dtype)

    def add_rms_norm_(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        residual_TD.add_(x_TD)
        return self.rms_norm(residual_TD, weight_D, eps)

    def silu_and_mul(self, gate_up_TI: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_TI.chunk(2, dim=-1)
        return F.silu(gate) * up

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_SD.float(), weight_VD.float())

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
        k_pool, v_pool = pool
        num_kv_heads, head_dim = k_pool.shape[2:]
        heads_THK = qkv_TX.unflatten(-1, (-1, head_dim))
        num_heads = heads_THK.shape[1] - 2 * num_kv_heads
        q_THK, k_THK, v_THK = heads_THK.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        k_pool.view(-1, num_kv_heads, head_dim)[slots_T] = rotate(self.rms_norm(k_THK, k_weight_K, eps), cos_sin_TK)
        v_pool.view(-1, num_kv_heads, head_dim)[slots_T] = v_THK
        return rotate(self.rms_norm(q_THK, q_weight_K, eps), cos_sin_TK)

    def rotate_vision_(self, qkv_BP3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> None:
        for i in (0, 1):
            qkv_BP3HK[:, :, i] = rotate(qkv_BP3HK[:, :, i], cos_sin_PK)

    def attend_dense(self, q_BHPK: torch.Tensor, k_BHPK: torch.Tensor, v_BHPK: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q_BHPK, k_BHPK, v_BHPK)


def rotate(x: torch.Tensor, cos_sin_TK: torch.Tensor) -> torch.Tensor:
    """Rotates pairs (i, i + K / 2) of x (..., T, H, K) by the angles of row t: "rotate half" as in transformers' `apply_rotary_pos_emb`."""
    cos, sin = cos_sin_TK.unsqueeze(-2).chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
