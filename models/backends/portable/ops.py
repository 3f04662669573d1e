"""`Ops` for NVIDIA GPUs: our Triton kernels, matrix products of cuBLAS with its epilogues. Made by the backends `portable` and `hopper`."""

from typing import Protocol

import torch

from models.backends.ops import Activation, Addends, Experts, KVPool, LateAddend, Product, Residual, Taps
from models.backends.portable import expert_gemv
from models.backends.portable.gemv import gemv, gemv_add_, gemv_swiglu, norm_gemv
from models.backends.portable.moe import ExpertGemv, SingleToken, sparse_swiglu
from models.backends.portable.pixels import resample, resample_to_patches_
from models.backends.portable.routing import route
from models.backends.portable.text import (
    norm_rope_store,
    quantized,
    rms_norm,
    rms_norm_quantized,
    rotary_rows,
    swiglu,
    swiglu_quantized,
)
from models.backends.portable.tower import layer_norm
from models.layers.fp8 import BlockScaled, GroupScaled, Weight
from models.parallel import Unsummed

SPLITS = 2  # of the inner dimension


class SingleFloat8(ExpertGemv, Protocol):
    """Products of float8 matrices with a single token, which they normalise and round. A norm is (weight, eps) of an RMSNorm, or None."""

    def takes(self, weight: BlockScaled, is_normed: bool) -> bool:
        """Whether it knows such a matrix."""

    def takes_experts(self, chosen: int) -> bool:
        """Whether it knows so many experts of a token."""

    def linear(
        self, x_1K: torch.Tensor, weight_NK: BlockScaled, norm: tuple[torch.Tensor, float] | None, out_1N: torch.Tensor | None = None
    ) -> torch.Tensor:
        """norm(x) @ weight.T, in `out_1N` if that is given."""

    def swiglu(self, x_1K: torch.Tensor, weight_NK: BlockScaled, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
        """silu(g) * u, where g and u are the halves of norm(x) @ weight.T."""

    def add_(self, x_1K: torch.Tensor, weight_NK: BlockScaled, stream_1N: torch.Tensor) -> None:
        """stream += x @ weight.T."""


class Fp8Products(Protocol):
    """Products of a float8 matrix, which add up in float32."""

    @property
    def single(self) -> SingleFloat8 | None:
        """For a single token, if there is something better than what follows."""

    def multiply(self, x_TK: GroupScaled, weight_NK: BlockScaled) -> torch.Tensor:
        """x @ weight.T in bfloat16."""

    def addends(self, x_TK: GroupScaled, weight_NK: BlockScaled) -> torch.Tensor:
        """(S, T, N) whose sum over S is the product, for the residual stream."""


class DeferredResidual:
    """See `Residual`. The result of a product may stay in parts, `_addends_STD`, which the next norm adds in passing."""

    def __init__(self, ops: "TritonOps", hidden_TD: torch.Tensor) -> None:
        self.sum_TD = hidden_TD
        self._ops = ops
        self._addends_STD: torch.Tensor | None = None

    def add_(self, addend: Product | Addends | LateAddend | Unsummed | torch.Tensor) -> None:
        assert self._addends_STD is None, "the addends of the product before were not taken"
        if isinstance(addend, Product):
            self._addends_STD = self._ops.add_product_(self.sum_TD, addend)
        elif isinstance(addend, Addends | torch.Tensor):
            self._addends_STD = addend[None] if isinstance(addend, torch.Tensor) else addend.parts_STD
        else:
            addend.add_to_(self.sum_TD)

    def keep_(self, tokens_S: torch.Tensor) -> None:
        assert self._addends_STD is None
        self.sum_TD = self.sum_TD[tokens_S]

    def num_addends(self) -> int:
        return 0 if self._addends_STD is None else len(self._addends_STD)

    def take_addends(self) -> torch.Tensor | None:
        """(S, T, D) or None; whoever takes them adds them to `sum_TD`."""
        addends_STD, self._addends_STD = self._addends_STD, None
        return addends_STD


class Normed:
    """RMSNorm of a residual stream, computed as the products want it: as values, as float8, or inside the product of a single token."""

    def __init__(self, residual: DeferredResidual, weight_D: torch.Tensor, eps: float) -> None:
        self._residual, self._norm = residual, (weight_D, eps)

    def values(self) -> torch.Tensor:
        return rms_norm(self._residual.sum_TD, *self._norm, self._residual.take_addends())

    def rounded(self) -> GroupScaled:
        return rms_norm_quantized(self._residual.sum_TD, *self._norm, self._residual.take_addends())

    def single(self) -> tuple[torch.Tensor, tuple[torch.Tensor, float]] | None:
        """The stream and the norm's weight and eps, if it has one token and lacks no more than one addend: a norm adds up many at once."""
        stream_TD = self._residual.sum_TD
        if len(stream_TD) > 1 or self._residual.num_addends() > 1:
            return None
        addends_STD = self._residual.take_addends()
        if addends_STD is not None:
            stream_TD.add_(addends_STD[0])
        return stream_TD, self._norm


class TritonOps:
    """See `Ops`. For bfloat16; tensors contiguous unless said otherwise there. For a single token our kernels beat cuBLAS.

    A product that joins the residual has few tiles if there are few tokens: up to `split_tokens` it is cut along the inner dimension.
    """

    def __init__(self, fp8: Fp8Products, split_tokens: int) -> None:
        self._fp8 = fp8
        self._split_tokens = split_tokens

    def residual(self, hidden_TD: torch.Tensor) -> Residual:
        return DeferredResidual(self, hidden_TD)

    def normed(self, residual: Residual, weight_D: torch.Tensor, eps: float) -> Normed:
        assert isinstance(residual, DeferredResidual)
        return Normed(residual, weight_D, eps)

    def rms_norm(self, residual: Residual, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
        return self.normed(residual, weight_D, eps).values()

    def linear(self, x_TX: torch.Tensor | Normed, weight_DX: Weight, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(weight_DX, BlockScaled):
            if (found := self._single_float8(x_TX, weight_DX)) is not None:
                single_float8, x_1X, norm = found
                return single_float8.linear(x_1X, weight_DX, norm, out_TD)
            y_TD = self._fp8.multiply(_rounded(x_TX), weight_DX)
            return y_TD if out_TD is None else out_TD.copy_(y_TD)
        if isinstance(x_TX, Normed):
            if (single := x_TX.single()) is not None:
                return gemv(single[0], weight_DX, single[0].dtype, single[1], out_TD)
            x_TX = x_TX.values()
        if len(x_TX) == 1:
            return gemv(x_TX, weight_DX, x_TX.dtype, out_1N=out_TD)
        return torch.mm(x_TX, weight_DX.t(), out=out_TD)

    def swiglu(self, x_TX: torch.Tensor | Normed, weight_NX: Weight) -> torch.Tensor | GroupScaled:
        if isinstance(weight_NX, BlockScaled):
            if (found := self._single_float8(x_TX, weight_NX)) is not None:
                single_float8, x_1X, norm = found
                return single_float8.swiglu(x_1X, weight_NX, norm)
            return swiglu_quantized(self.linear(x_TX, weight_NX))
        if isinstance(x_TX, Normed) and (single := x_TX.single()) is not None:
            return gemv_swiglu(single[0], weight_NX, single[1])
        return swiglu(self.linear(x_TX, weight_NX))

    def sparse_swiglu(self, x_TD: Normed, experts: Experts, real_T: torch.Tensor | None) -> Addends | LateAddend:
        if (single := x_TD.single()) is not None:
            values_TD, logits_TE = norm_gemv(single[0], experts.router_ED, single[1])
        else:
            values_TD = x_TD.values()
            logits_TE = self.linear(values_TD, experts.router_ED)
        if len(values_TD) == 1:
            own = self._fp8.single if isinstance(experts.gate_up, BlockScaled) else None
            products: ExpertGemv = own if own is not None and own.takes_experts(experts.num_chosen) else expert_gemv
            return SingleToken.of(values_TD, route(logits_TE, experts, real_T), experts, products)
        return Addends(sparse_swiglu(values_TD, logits_TE, experts, real_T))

    def add_product_(self, stream_TD: torch.Tensor, product: Product) -> torch.Tensor | None:
        """stream += the product, now (then this returns None) or when the addends (S, T, D) are added that this returns."""
        x_TX, weight_DX = product.input_TX, product.weight_DX
        if isinstance(weight_DX, BlockScaled):
            if (found := self._single_float8(x_TX, weight_DX)) is None:
                return self._fp8.addends(_rounded(x_TX), weight_DX)
            found[0].add_(found[1], weight_DX, stream_TD)
            return None
        if len(x_TX) == 1:
            gemv_add_(x_TX, weight_DX, stream_TD)
        elif len(x_TX) <= self._split_tokens:
            parts_STX, parts_SXD = x_TX.unflatten(1, (SPLITS, -1)).transpose(0, 1), weight_DX.unflatten(1, (SPLITS, -1)).permute(1, 2, 0)
            return torch.bmm(parts_STX, parts_SXD, out_dtype=torch.float32)
        else:
            stream_TD.addmm_(x_TX, weight_DX.t())
        return None

    def _single_float8(
        self, x_TX: Activation, weight: BlockScaled
    ) -> tuple[SingleFloat8, torch.Tensor, tuple[torch.Tensor, float] | None] | None:
        """For a single token: what multiplies, its values, and the norm that they lack if they lack one."""
        single, is_normed = self._fp8.single, isinstance(x_TX, Normed)
        if single is None or not single.takes(weight, is_normed):
            return None
        if is_normed:
            return None if (found := x_TX.single()) is None else (single, *found)
        return (single, x_TX, None) if isinstance(x_TX, torch.Tensor) and len(x_TX) == 1 else None

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # GEMM, bias and tanh-GELU in one kernel. On CUDA this op's GELU is the tanh one, on a CPU it would be the exact one.
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        if len(x_SD) == 1:
            return gemv(x_SD, weight_VD, torch.float32, out_1N=out_SV)
        return torch.mm(x_SD, weight_VD.t(), out_dtype=torch.float32, out=out_SV)

    def layer_norm(self, x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        return layer_norm(x, offset_D, weight, bias, eps)

    def rotary_rows(self, positions_AT: torch.Tensor, axis_J: torch.Tensor, inv_freq_J: torch.Tensor) -> torch.Tensor:
        return rotary_rows(positions_AT, axis_J, inv_freq_J)

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


def _rounded(x_TK: torch.Tensor | Normed | GroupScaled) -> GroupScaled:
    if isinstance(x_TK, Normed):
        return x_TK.rounded()
    return x_TK if isinstance(x_TK, GroupScaled) else quantized(x_TK)
