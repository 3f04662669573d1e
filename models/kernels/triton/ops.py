"""`Ops` for NVIDIA GPUs: our Triton kernels, and products of cuBLAS with its epilogues."""

from collections.abc import Callable
from typing import Protocol

import torch

from models.kernels.ops import Activation, Experts, Normed, Residual
from models.kernels.triton import expert_gemv
from models.kernels.triton.delta import delta_rule
from models.kernels.triton.fp8 import MOST_TOKENS, multiply, multiply_in_parts
from models.kernels.triton.gemv import Norm, gemv
from models.kernels.triton.moe import sparse_swiglu
from models.kernels.triton.pixels import resample, resample_to_patches_
from models.kernels.triton.routing import route
from models.kernels.triton.text import gate, norm_rope_store, quantized, rms_norm, rms_norm_quantized, rotary_rows, swiglu, swiglu_quantized
from models.kernels.triton.tower import layer_norm
from models.weights.float8 import BlockScaled, GroupScaled, Weight

SPLITS = 2  # of the inner dimension

Single = tuple[Callable[..., torch.Tensor], torch.Tensor, Norm | None]  # a GEMV, its vector, and the norm that this still lacks


class ExpertGemv(Protocol):
    """A single token's products with its experts."""

    def expert_swiglu(self, x_1D: torch.Tensor, gate_up: Weight, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor: ...

    def expert_sum(
        self, inner_KI: torch.Tensor, down: Weight, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
    ) -> None: ...


class SingleFloat8(ExpertGemv, Protocol):
    """The same, and `gemv`, for float8 matrices."""

    MAX_CHOSEN: int  # experts of a token

    def gemv(
        self, x_1K: torch.Tensor, weight_NK: Weight, out_1N: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False
    ) -> torch.Tensor: ...


def single_of(x_TD: Normed) -> tuple[torch.Tensor, Norm] | None:
    """The stream and its norm, if it has one token and lacks at most one addend."""
    residual = x_TD.residual
    if len(residual.sum_TD) > 1 or (residual.parts_STD is not None and len(residual.parts_STD) > 1):
        return None
    if (parts_STD := residual.take_parts()) is not None:
        residual.sum_TD.add_(parts_STD[0])
    return residual.sum_TD, (x_TD.weight_D, x_TD.eps)


class TritonOps:
    """See `Ops`. For bfloat16 and contiguous tensors. Products of up to `split_tokens` tokens that join the residual have few tiles: they
    are cut along the inner dimension."""

    def __init__(
        self,
        split_tokens: int,
        float8: Callable[[GroupScaled, BlockScaled], torch.Tensor] = multiply,
        single_float8: SingleFloat8 | None = None,
    ) -> None:
        self._split_tokens = split_tokens
        self._float8, self._single_float8 = float8, single_float8

    def norm(self, x_TD: Normed) -> torch.Tensor:
        return rms_norm(x_TD.residual.sum_TD, x_TD.weight_D, x_TD.eps, x_TD.residual.take_parts())

    def linear(self, x_TX: Activation, weight_DX: Weight, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        if (single := self._single(x_TX, weight_DX)) is not None:
            multiply_single, x_1X, norm = single
            return multiply_single(x_1X, weight_DX, x_1X.new_empty((1, len(weight_DX))) if out_TD is None else out_TD, norm)
        if isinstance(weight_DX, BlockScaled):
            y_TD = self._float8(_rounded(x_TX), weight_DX)
            return y_TD if out_TD is None else out_TD.copy_(y_TD)
        return torch.mm(self._values(x_TX), weight_DX.t(), out=out_TD)

    def swiglu(self, x_TX: Activation, weight_NX: Weight) -> torch.Tensor | GroupScaled:
        if (single := self._single(x_TX, weight_NX)) is not None:
            multiply_single, x_1X, norm = single
            return multiply_single(x_1X, weight_NX, x_1X.new_empty((1, len(weight_NX) // 2)), norm, gated=True)
        gate_up_TN = self.linear(x_TX, weight_NX)
        return swiglu_quantized(gate_up_TN) if isinstance(weight_NX, BlockScaled) else swiglu(gate_up_TN)

    def add_product_(self, residual: Residual, x_TX: Activation, weight_DX: Weight) -> None:
        assert residual.parts_STD is None, "the parts of the product before were not added"
        if (single := self._single(x_TX, weight_DX)) is not None:
            multiply_single, x_1X, norm = single
            multiply_single(x_1X, weight_DX, residual.sum_TD, norm, adds=True)
        elif isinstance(weight_DX, BlockScaled):
            rounded = _rounded(x_TX)
            few = len(rounded) <= MOST_TOKENS
            residual.add_(multiply_in_parts(rounded, weight_DX) if few else self._float8(rounded, weight_DX)[None])
        elif len(x_TX := self._values(x_TX)) <= self._split_tokens:
            parts_STX, parts_SXD = x_TX.unflatten(1, (SPLITS, -1)).transpose(0, 1), weight_DX.unflatten(1, (SPLITS, -1)).permute(1, 2, 0)
            residual.add_(torch.bmm(parts_STX, parts_SXD, out_dtype=torch.float32))
        else:
            residual.sum_TD.addmm_(x_TX, weight_DX.t())

    def sparse_swiglu(self, x_TD: Normed, experts: Experts, real_T: torch.Tensor | None) -> torch.Tensor:
        parts_STD = self._experts(x_TD, experts, real_T, None)
        assert parts_STD is not None
        return parts_STD

    def add_experts_(self, residual: Residual, x_TD: Normed, experts: Experts, real_T: torch.Tensor | None) -> None:
        if (parts_STD := self._experts(x_TD, experts, real_T, residual.sum_TD)) is not None:
            residual.add_(parts_STD)

    def _experts(self, x_TD: Normed, experts: Experts, real_T: torch.Tensor | None, stream_TD: torch.Tensor | None) -> torch.Tensor | None:
        """As `sparse_swiglu`; None if a single token's sum was added to `stream_TD`, where that is given."""
        if (single := single_of(x_TD)) is not None:
            stream_1D, norm = single
            values_TD, logits_TE = torch.empty_like(stream_1D), stream_1D.new_empty((1, len(experts.router_ED)))
            gemv(stream_1D, experts.router_ED, logits_TE, norm, normed_1D=values_TD)
        else:
            values_TD = self.norm(x_TD)
            logits_TE = self.linear(values_TD, experts.router_ED)
        own: ExpertGemv | None = expert_gemv
        if isinstance(experts.gate_up, BlockScaled):
            own = self._single_float8 if self._single_float8 and experts.num_given <= self._single_float8.MAX_CHOSEN else None
        if len(values_TD) > 1 or own is None:
            return sparse_swiglu(values_TD, logits_TE, experts, real_T)
        choices = route(logits_TE, experts, real_T)
        chosen_K, weights_K = choices.experts_TK[0], choices.weights_TK[0]
        inner_KI = own.expert_swiglu(values_TD, experts.gate_up, chosen_K, experts.count)
        out_1D = torch.empty_like(values_TD) if stream_TD is None else stream_TD
        own.expert_sum(inner_KI, experts.down, chosen_K, weights_K, out_1D, adds=stream_TD is not None)
        return out_1D[None] if stream_TD is None else None

    def _single(self, x_TX: Activation, weight: Weight) -> Single | None:
        product: Callable[..., torch.Tensor] = gemv
        if isinstance(weight, BlockScaled):
            own = self._single_float8
            if own is None:
                return None
            product = own.gemv
        if isinstance(x_TX, Normed):
            return None if (single := single_of(x_TX)) is None else (product, *single)
        return (product, x_TX, None) if isinstance(x_TX, torch.Tensor) and len(x_TX) == 1 else None

    def _values(self, x_TX: Activation) -> torch.Tensor:
        assert not isinstance(x_TX, GroupScaled)
        return self.norm(x_TX) if isinstance(x_TX, Normed) else x_TX

    gate_ = staticmethod(gate)

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # One kernel. On CUDA this GELU is the tanh one, on a CPU it would be the exact one.
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: Weight, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight_VD, BlockScaled):
            assert out_SV is None
            return multiply(quantized(x_SD), weight_VD, torch.float32)
        if len(x_SD) == 1:
            return gemv(x_SD, weight_VD, x_SD.new_empty((1, len(weight_VD)), dtype=torch.float32) if out_SV is None else out_SV)
        return torch.mm(x_SD, weight_VD.t(), out_dtype=torch.float32, out=out_SV)

    layer_norm = staticmethod(layer_norm)
    rotary_rows = staticmethod(rotary_rows)
    norm_rope_store_ = staticmethod(norm_rope_store)
    delta_rule_ = staticmethod(delta_rule)
    resample = staticmethod(resample)
    resample_to_patches_ = staticmethod(resample_to_patches_)


def _rounded(x_TK: Activation) -> GroupScaled:
    if isinstance(x_TK, Normed):
        return rms_norm_quantized(x_TK.residual.sum_TD, x_TK.weight_D, x_TK.eps, x_TK.residual.take_parts())
    return x_TK if isinstance(x_TK, GroupScaled) else quantized(x_TK)
