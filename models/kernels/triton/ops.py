"""`Ops` for NVIDIA GPUs: our Triton kernels, and products of cuBLAS with its epilogues."""

import torch

from models.kernels.ops import Experts
from models.kernels.stream import Normed, Residual, RowClass
from models.kernels.triton.activations import inputs_of_experts, single_of, values_of
from models.kernels.triton.delta import delta_rule
from models.kernels.triton.gemv import gemv
from models.kernels.triton.pixels import resample, resample_to_patches_
from models.kernels.triton.plain import TritonPlain
from models.kernels.triton.products import triton_products
from models.kernels.triton.routing import route
from models.kernels.triton.text import gate, norm_rope_store, rotary_rows
from models.kernels.triton.tower import layer_norm
from models.weights.float8 import BlockScaled
from models.weights.plain import Plain


class TritonOps:
    """See `Ops`. For bfloat16 and contiguous tensors."""

    norm = staticmethod(values_of)

    def sparse_swiglu(self, x_TD: Normed, experts: Experts, rows: RowClass, valid_T: torch.Tensor | None) -> torch.Tensor:
        parts_STD = self._experts(x_TD, experts, rows, valid_T)
        assert parts_STD is not None
        return parts_STD

    def add_experts_(self, residual: Residual, x_TD: Normed, experts: Experts, rows: RowClass, valid_T: torch.Tensor | None) -> None:
        if (parts_STD := self._experts(x_TD, experts, rows, valid_T, residual)) is not None:
            residual.add_(parts_STD)

    def _experts(
        self, x_TD: Normed, experts: Experts, rows: RowClass, valid_T: torch.Tensor | None, residual: Residual | None = None
    ) -> torch.Tensor | None:
        """Compute `sparse_swiglu`; return None if a single token's sum was added to `residual`."""
        products, down = triton_products(experts.gate_up), triton_products(experts.down)
        has_gemv = experts.num_given <= min(products.max_chosen, down.max_chosen)
        if has_gemv and (single := single_of(x_TD, rows)) is not None:
            stream_1D, norm = single
            x_1D, logits_11E = torch.empty_like(stream_1D), stream_1D.new_empty((1, 1, len(experts.router_ED)))
            gemv(stream_1D, experts.router_ED, logits_11E[0], norm, normed_1D=x_1D)
            choices = route(logits_11E, experts, valid_T)
            chosen_K, weights_K = choices.experts_TK[0], choices.weights_TK[0]
            inner_KI = products.expert_swiglu(x_1D, chosen_K)
            out_1D = torch.empty_like(x_1D) if residual is None else residual.sum_TD
            down.expert_sum(inner_KI, chosen_K, weights_K, out_1D, adds=residual is not None)
            return out_1D[None] if residual is None else None
        counts_E = x_TD.stream_TD.new_empty(experts.count, dtype=torch.int32)
        values_TD, inputs = inputs_of_experts(x_TD, isinstance(products.matrix, BlockScaled), counts_E)
        logits_STE, room = self._logits(values_TD, experts.router_ED, rows), values_TD.new_empty if residual is None else residual.room
        return products.sparse_swiglu(inputs, logits_STE, counts_E, experts, valid_T, room)

    def _logits(self, x_TD: torch.Tensor, router_ED: torch.Tensor, rows: RowClass) -> torch.Tensor:
        """Return the router's logits (S, T, E), or partial sums in float32."""
        return TritonPlain(Plain(router_ED)).product(x_TD, rows)[None]

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
