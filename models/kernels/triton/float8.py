"""Products of float8 matrices in scaled blocks, of inputs that are rounded likewise."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from models.kernels.ops import Activation, Residual
from models.kernels.triton.activations import rounded
from models.kernels.triton.fp8 import MOST_TOKENS, multiply, multiply_in_parts
from models.kernels.triton.products import ExpertGemv, Products
from models.kernels.triton.text import quantized, swiglu_quantized
from models.weights.float8 import BlockScaled, GroupScaled


class SingleFloat8(ExpertGemv, Protocol):
    """Products of a single token."""

    MAX_CHOSEN: int  # experts of a token
    gemv: Callable[..., Any]


class Float8Products(Products):
    """`multiply` is for any number of tokens, `single` for one, if there is such a kernel."""

    def __init__(
        self, multiply: Callable[[GroupScaled, BlockScaled], torch.Tensor] = multiply, single: SingleFloat8 | None = None
    ) -> None:
        self._multiply, self._single = multiply, single
        self.gemv = None if single is None else single.gemv

    def linear_of_many(self, x_TX: Activation, weight: BlockScaled, out_TD: torch.Tensor | None) -> torch.Tensor:
        y_TD = self._multiply(rounded(x_TX), weight)
        return y_TD if out_TD is None else out_TD.copy_(y_TD)

    def activated(self, gate_up_TN: torch.Tensor) -> GroupScaled:
        return swiglu_quantized(gate_up_TN)

    def add_many_(self, residual: Residual, x_TX: Activation, weight: BlockScaled) -> None:
        x_TX = rounded(x_TX)
        few = len(x_TX) <= MOST_TOKENS
        residual.add_(multiply_in_parts(x_TX, weight) if few else self._multiply(x_TX, weight)[None])

    def linear_f32(self, x_SD: torch.Tensor, weight: BlockScaled, out_SV: torch.Tensor | None = None) -> torch.Tensor:
        assert out_SV is None
        return multiply(quantized(x_SD), weight, torch.float32)

    def single_experts(self, num_given: int) -> ExpertGemv | None:
        return self._single if self._single is not None and num_given <= self._single.MAX_CHOSEN else None
