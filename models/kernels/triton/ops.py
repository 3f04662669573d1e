"""`Ops` for NVIDIA GPUs: our Triton kernels, and products of cuBLAS with its epilogues."""

import torch

from models.kernels.ops import Activation, Experts, Normed, Residual
from models.kernels.triton.activations import single_of, values_of
from models.kernels.triton.delta import delta_rule
from models.kernels.triton.float8 import Float8Products
from models.kernels.triton.gemv import gemv
from models.kernels.triton.moe import sparse_swiglu
from models.kernels.triton.pixels import resample, resample_to_patches_
from models.kernels.triton.plain import PlainProducts
from models.kernels.triton.products import Products
from models.kernels.triton.routing import route
from models.kernels.triton.text import gate, norm_rope_store, rotary_rows
from models.kernels.triton.tower import layer_norm
from models.weights.float8 import BlockScaled, GroupScaled, Weight


class TritonOps:
    """See `Ops`. For bfloat16 and contiguous tensors. Products are those of the matrix's format."""

    def __init__(self, split_tokens: int, float8: Float8Products | None = None) -> None:
        self._plain = PlainProducts(split_tokens)
        of_types: list[tuple[type, Products]] = [(torch.Tensor, self._plain), (torch.nn.Parameter, self._plain)]
        self._products = dict([*of_types, (BlockScaled, float8 or Float8Products())])

    def norm(self, x_TD: Normed) -> torch.Tensor:
        return values_of(x_TD)

    def linear(self, x_TX: Activation, weight_DX: Weight, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        return self._products[type(weight_DX)].linear(x_TX, weight_DX, out_TD)

    def swiglu(self, x_TX: Activation, weight_NX: Weight) -> torch.Tensor | GroupScaled:
        return self._products[type(weight_NX)].swiglu(x_TX, weight_NX)

    def add_product_(self, residual: Residual, x_TX: Activation, weight_DX: Weight) -> None:
        assert residual.parts_STD is None, "the parts of the product before were not added"
        self._products[type(weight_DX)].add_(residual, x_TX, weight_DX)

    def linear_f32(self, x_SD: torch.Tensor, weight_VD: Weight, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        return self._products[type(weight_VD)].linear_f32(x_SD, weight_VD, out_SV)

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
            logits_TE = self._plain.linear(values_TD, experts.router_ED)
        own = self._products[type(experts.gate_up)].single_experts(experts.num_given)
        if len(values_TD) > 1 or own is None:
            return sparse_swiglu(values_TD, logits_TE, experts, real_T)
        choices = route(logits_TE, experts, real_T)
        chosen_K, weights_K = choices.experts_TK[0], choices.weights_TK[0]
        inner_KI = own.expert_swiglu(values_TD, experts.gate_up, chosen_K, experts.count)
        out_1D = torch.empty_like(values_TD) if stream_TD is None else stream_TD
        own.expert_sum(inner_KI, experts.down, chosen_K, weights_K, out_1D, adds=stream_TD is not None)
        return out_1D[None] if stream_TD is None else None

    gate_ = staticmethod(gate)

    def linear_gelu(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        # One kernel. On CUDA this GELU is the tanh one, on a CPU it would be the exact one.
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=True)

    layer_norm = staticmethod(layer_norm)
    rotary_rows = staticmethod(rotary_rows)
    norm_rope_store_ = staticmethod(norm_rope_store)
    delta_rule_ = staticmethod(delta_rule)
    resample = staticmethod(resample)
    resample_to_patches_ = staticmethod(resample_to_patches_)
