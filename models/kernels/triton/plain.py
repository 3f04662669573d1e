"""Products of matrices in bfloat16: our GEMV for a single token, cuBLAS for more."""

import torch

from models.kernels.ops import Activation, Residual
from models.kernels.triton import expert_gemv
from models.kernels.triton.activations import values_of
from models.kernels.triton.gemv import gemv
from models.kernels.triton.products import ExpertGemv, Products
from models.kernels.triton.text import swiglu

SPLITS = 2  # of the inner dimension


class PlainProducts(Products):
    """Products of up to `split_tokens` tokens that join the residual have few tiles: they are cut along the inner dimension."""

    gemv = staticmethod(gemv)

    def __init__(self, split_tokens: int) -> None:
        self._split_tokens = split_tokens

    def linear_of_many(self, x_TX: Activation, weight: torch.Tensor, out_TD: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(values_of(x_TX), weight.t(), out=out_TD)

    def activated(self, gate_up_TN: torch.Tensor) -> torch.Tensor:
        return swiglu(gate_up_TN)

    def add_many_(self, residual: Residual, x_TX: Activation, weight: torch.Tensor) -> None:
        if len(x_TX := values_of(x_TX)) <= self._split_tokens:
            parts_STX, parts_SXD = x_TX.unflatten(1, (SPLITS, -1)).transpose(0, 1), weight.unflatten(1, (SPLITS, -1)).permute(1, 2, 0)
            residual.add_(torch.bmm(parts_STX, parts_SXD, out_dtype=torch.float32))
        else:
            residual.sum_TD.addmm_(x_TX, weight.t())

    def linear_f32(self, x_SD: torch.Tensor, weight: torch.Tensor, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        if len(x_SD) == 1:
            return gemv(x_SD, weight, x_SD.new_empty((1, len(weight)), dtype=torch.float32) if out_SV is None else out_SV)
        return torch.mm(x_SD, weight.t(), out_dtype=torch.float32, out=out_SV)

    def single_experts(self, num_given: int) -> ExpertGemv:
        return expert_gemv
