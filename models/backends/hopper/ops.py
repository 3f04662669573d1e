"""`Ops` for NVIDIA GPUs: our Triton kernels, matrix products of cuBLAS with its epilogues. Made by `make_ops`."""

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, scaled_mm

from models.backends.ops import KVPool, Taps
from models.backends.portable.fp8 import MOST_TOKENS, multiply, multiply_in_parts
from models.backends.portable.gemv import gemv, gemv_add_, gemv_swiglu
from models.backends.portable.pixels import resample, resample_to_patches_
from models.backends.portable.text import norm_rope_store, quantized, rms_norm, rms_norm_quantized, swiglu, swiglu_quantized
from models.backends.portable.tower import layer_norm
from models.layers.fp8 import BlockScaled, GroupScaled, Input, Weight

# A product that joins the residual has few tiles if there are few tokens. Cut along the inner dimension it fills the device; with more than
# SPLIT_TOKENS cuBLAS is as fast (measured on an H200 at the widths of the 8B model).
SPLIT_TOKENS = 304
SPLITS = 2
FEW_TOKENS = 64  # up to here our float8 product is faster than cuBLAS's, or at least gate and up, also if it is not cut (measured likewise)


class CudaOps:
    """See `Ops`. For bfloat16; tensors contiguous unless said otherwise there. For a single token our kernels beat cuBLAS."""

    def rms_norm(self, x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, addends: torch.Tensor | None = None) -> torch.Tensor:
        return rms_norm(x_TD, weight_D, eps, addends)

    def norm_linear(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight_ND: Weight, addends: torch.Tensor | None = None
    ) -> torch.Tensor:
        if isinstance(weight_ND, BlockScaled):
            return _multiply(rms_norm_quantized(x_TD, norm_D, eps, addends), weight_ND)
        if len(x_TD) == 1:
            return gemv(_with(addends, x_TD), weight_ND, x_TD.dtype, (norm_D, eps))
        return F.linear(rms_norm(x_TD, norm_D, eps, addends), weight_ND)

    def norm_swiglu(
        self, x_TD: torch.Tensor, norm_D: torch.Tensor, eps: float, weight_ND: Weight, addends: torch.Tensor | None = None
    ) -> Input:
        if isinstance(weight_ND, BlockScaled):
            return swiglu_quantized(self.norm_linear(x_TD, norm_D, eps, weight_ND, addends))
        if len(x_TD) == 1:
            return gemv_swiglu(_with(addends, x_TD), weight_ND, (norm_D, eps))
        return swiglu(self.norm_linear(x_TD, norm_D, eps, weight_ND, addends))

    def linear_add_(self, x_TX: Input, weight_DX: Weight, residual_TD: torch.Tensor) -> torch.Tensor | None:
        if isinstance(weight_DX, BlockScaled):
            rounded = _rounded(x_TX)
            return multiply_in_parts(rounded, weight_DX) if len(rounded) <= MOST_TOKENS else _multiply(rounded, weight_DX)[None]
        assert isinstance(x_TX, torch.Tensor)
        if len(x_TX) == 1:
            gemv_add_(x_TX, weight_DX, residual_TD)
        elif len(x_TX) <= SPLIT_TOKENS:
            parts_STX, parts_SXD = x_TX.unflatten(1, (SPLITS, -1)).transpose(0, 1), weight_DX.unflatten(1, (SPLITS, -1)).permute(1, 2, 0)
            return torch.bmm(parts_STX, parts_SXD, out_dtype=torch.float32)
        else:
            residual_TD.addmm_(x_TX, weight_DX.t())
        return None

    def linear(self, x_TX: Input, weight_DX: Weight, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight_DX, BlockScaled):
            y_TD = _multiply(_rounded(x_TX), weight_DX)
            return y_TD if out_TD is None else out_TD.copy_(y_TD)
        assert isinstance(x_TX, torch.Tensor)
        if len(x_TX) == 1:
            return gemv(x_TX, weight_DX, x_TX.dtype, out_1N=out_TD)
        return torch.mm(x_TX, weight_DX.t(), out=out_TD)

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # GEMM, bias and tanh-GELU in one kernel. On CUDA this op's GELU is the tanh one, on a CPU it would be the exact one.
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        if len(x_SD) == 1:
            return gemv(x_SD, weight_VD, torch.float32, out_1N=out_SV)
        return torch.mm(x_SD, weight_VD.t(), out_dtype=torch.float32, out=out_SV)

    def layer_norm(self, x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return layer_norm(x, offset_D, weight, bias, eps)

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

    def resample(self, image_HWC: torch.Tensor, axis: int, taps: Taps) -> torch.Tensor:
        return resample(image_HWC, axis, taps)

    def resample_to_patches_(
        self, image_HWC: torch.Tensor, axis: int, taps: Taps, patch_size: int, merge_size: int, out_PX: torch.Tensor
    ) -> None:
        resample_to_patches_(image_HWC, axis, taps, patch_size, merge_size, out_PX)


def _rounded(x_TK: Input) -> GroupScaled:
    return x_TK if isinstance(x_TK, GroupScaled) else quantized(x_TK)


def _multiply(x_TK: GroupScaled, weight_NK: BlockScaled) -> torch.Tensor:
    """x @ weight.T in bfloat16, added up in float32: of more than a few tokens, cuBLAS's products of 1 x 128 and 128 x 128 blocks."""
    if len(x_TK) <= FEW_TOKENS:
        return multiply(x_TK, weight_NK, torch.bfloat16)
    weight_KN, weight_scales = weight_NK.transposed
    scales = x_TK.scales, ScalingType.BlockWise1x128, weight_scales, ScalingType.BlockWise128x128
    y_TN = scaled_mm(x_TK.padded, weight_KN, *scales, output_dtype=torch.bfloat16)
    return y_TN if len(y_TN) == len(x_TK) else y_TN[: len(x_TK)]


def _with(addends: torch.Tensor | None, x_TD: torch.Tensor) -> torch.Tensor:
    """`x_TD`, to which they were added."""
    for addend_TD in () if addends is None else addends:
        x_TD.add_(addend_TD)
    return x_TD
