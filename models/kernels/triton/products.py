"""Products of matrices of one format: a GEMV for a single token, with the norm that its input still lacks, or a product of many."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch

from models.kernels.ops import Activation, Residual
from models.kernels.triton.activations import single_of
from models.weights.float8 import GroupScaled


class ExpertGemv(Protocol):
    """A single token's products with its experts; matrices have one format."""

    def expert_swiglu(self, x_1D: torch.Tensor, gate_up: Any, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor: ...

    def expert_sum(
        self, inner_KI: torch.Tensor, down: Any, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
    ) -> None: ...


class Products(ABC):
    """See the methods of `Ops`; `add_` is `add_product_`. `weight` has the format of the class."""

    gemv: Callable[..., torch.Tensor] | None  # x, weight, out, norm, whether it is gated, or adds; None: there is none

    def linear(self, x_TX: Activation, weight: Any, out_TD: torch.Tensor | None = None) -> torch.Tensor:
        if self.gemv is None or (single := single_of(x_TX)) is None:
            return self.linear_of_many(x_TX, weight, out_TD)
        x_1X, norm = single
        return self.gemv(x_1X, weight, x_1X.new_empty((1, len(weight))) if out_TD is None else out_TD, norm)

    def swiglu(self, x_TX: Activation, weight: Any) -> torch.Tensor | GroupScaled:
        if self.gemv is None or (single := single_of(x_TX)) is None:
            return self.activated(self.linear_of_many(x_TX, weight, None))
        x_1X, norm = single
        return self.gemv(x_1X, weight, x_1X.new_empty((1, len(weight) // 2)), norm, gated=True)

    def add_(self, residual: Residual, x_TX: Activation, weight: Any) -> None:
        if self.gemv is None or (single := single_of(x_TX)) is None:
            self.add_many_(residual, x_TX, weight)
        else:
            self.gemv(single[0], weight, residual.sum_TD, single[1], adds=True)

    @abstractmethod
    def linear_of_many(self, x_TX: Activation, weight: Any, out_TD: torch.Tensor | None) -> torch.Tensor: ...

    @abstractmethod
    def activated(self, gate_up_TN: torch.Tensor) -> torch.Tensor | GroupScaled:
        """silu(first half) * second half, as the next product takes it."""

    @abstractmethod
    def add_many_(self, residual: Residual, x_TX: Activation, weight: Any) -> None: ...

    @abstractmethod
    def linear_f32(self, x_SD: torch.Tensor, weight: Any, out_SV: torch.Tensor | None = None) -> torch.Tensor: ...

    @abstractmethod
    def single_experts(self, num_given: int) -> ExpertGemv | None:
        """For a single token with so many experts; None: it is computed as several are."""
