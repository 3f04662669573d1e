"""`Ops` in plain torch: the reference."""

import torch
import torch.nn.functional as F

from models.kernels.ops import FLOAT8, MOST_FLOAT8, PIXEL_OFFSET, TAP_BITS, Experts, KVPool, NewHeads, Taps
from models.kernels.reference.delta import delta_rule_
from models.kernels.reference.moe import sparse_swiglu
from models.kernels.reference.norms import rms_norm, values_of
from models.kernels.stream import Normed, Residual, RowClass


class TorchOps:
    """See `Ops`. Arithmetic is float32; results have the input's dtype."""

    norm = staticmethod(values_of)

    def sparse_swiglu(self, x_TD: Normed, experts: Experts, rows: RowClass, valid_T: torch.Tensor | None) -> torch.Tensor:
        return sparse_swiglu(values_of(x_TD), experts, valid_T)

    def add_experts_(self, residual: Residual, x_TD: Normed, experts: Experts, rows: RowClass, valid_T: torch.Tensor | None) -> None:
        residual.sum_TD.add_(self.sparse_swiglu(x_TD, experts, rows, valid_T).sum(0))

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, weight, bias), approximate="tanh")

    def layer_norm(self, x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        whole = x.float() + offset_D.repeat(x.shape[1] // len(offset_D))
        return F.layer_norm(whole, weight.shape, weight.float(), bias.float(), eps).to(x.dtype)

    def rotary_rows(self, positions_AT: torch.Tensor, axis_J: torch.Tensor, inv_freq_J: torch.Tensor) -> torch.Tensor:
        angles_TJ = positions_AT.index_select(0, axis_J).t().float() * inv_freq_J
        return torch.cat((angles_TJ.cos(), angles_TJ.sin()), dim=-1)

    def norm_rope_store_(self, heads: NewHeads, pool: KVPool) -> torch.Tensor:
        num_kv_heads, head_dim = pool[0].shape[2:]
        heads_THK = heads.qkv_TX.unflatten(-1, (-1, head_dim))
        num_heads = heads_THK.shape[1] - 2 * num_kv_heads
        q_THK, k_THK, v_THK = heads_THK.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if heads.q_weight_K is not None and heads.k_weight_K is not None:
            q_THK, k_THK = rms_norm(q_THK, heads.q_weight_K, heads.eps), rms_norm(k_THK, heads.k_weight_K, heads.eps)
        stored = rotate(k_THK, heads.cos_sin_TK), torch.where(v_THK.isfinite(), v_THK, 0)
        for cache, values_THK, scale in zip(pool, stored, heads.scales, strict=True):
            if cache.dtype == FLOAT8:  # torch cannot index it
                values_THK = (values_THK.float() / scale).nan_to_num(nan=0.0).clamp(-MOST_FLOAT8, MOST_FLOAT8).to(FLOAT8).view(torch.uint8)
                cache = cache.view(torch.uint8)
            cache.view(-1, num_kv_heads, head_dim)[heads.slots_T] = values_THK
        return rotate(q_THK, heads.cos_sin_TK)

    def gate_(self, x_TX: torch.Tensor, gate_TG: torch.Tensor) -> None:
        groups = x_TX.unflatten(1, (gate_TG.shape[1], -1))
        groups.copy_(groups.float() * gate_TG.float().sigmoid()[:, :, None])

    delta_rule_ = staticmethod(delta_rule_)

    def resample(self, image_HWC: torch.Tensor, axis: int, taps: Taps) -> torch.Tensor:
        last = image_HWC.shape[axis] - 1
        total: torch.Tensor | int = 1 << (TAP_BITS - 1)
        for t, weight in enumerate(taps.weights.unbind(1)):
            pixels = image_HWC.index_select(axis, (taps.first + t).clamp(max=last))
            total = total + pixels.int() * weight.view((-1, 1, 1) if axis == 0 else (-1, 1))
        assert isinstance(total, torch.Tensor)
        return (total >> TAP_BITS).clamp_(0, 255).to(torch.uint8)

    def resample_to_patches_(
        self, image_HWC: torch.Tensor, axis: int, taps: Taps, patch_size: int, merge_size: int, out_PX: torch.Tensor
    ) -> None:
        pixels_HWC = self.resample(image_HWC, axis, taps)
        size = (-1, merge_size, patch_size)
        blocks = pixels_HWC.unflatten(1, size).unflatten(0, size)  # Y, i, y, X, j, x, C
        ordered = blocks.permute(0, 3, 1, 4, 6, 2, 5)  # Y, X, i, j, C, y, x
        out_PX.view(ordered.shape).copy_(ordered).sub_(PIXEL_OFFSET)


def rotate(x: torch.Tensor, cos_sin_TK: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (i, i + K / 2) of the first K values of x (..., T, H, X) by the angles of row t."""
    cos, sin = cos_sin_TK.unsqueeze(-2).chunk(2, dim=-1)
    rotated, rest = x.float().tensor_split((cos_sin_TK.shape[-1],), dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1).to(x.dtype)
