"""Products of matrices on NVIDIA GPUs: a GEMV with a fused norm for a single token, or a product for several. Each format
implements `multiply`."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from models.kernels.ops import Experts
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import single_of
from models.kernels.triton.routing import SortedChoices
from models.kernels.triton.text import swiglu
from models.kernels.triton.tuned import ExpertTiles
from models.weights.matrix import Matrix, Products

S = TypeVar("S")


class ExpertGemv(Protocol):
    """Products of a single token with its experts; all matrices have the same format."""

    def expert_swiglu(self, x_1D: torch.Tensor, gate_up: Any, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor: ...

    def expert_sum(
        self, inner_KI: torch.Tensor, down: Any, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
    ) -> None: ...


class ExpertProducts(Protocol):
    """Products of the choices of several tokens by other kernels than those of `moe`."""

    def rows_of(self, matrices: Any, num_slots: int) -> int:
        """Return the rows of a block of sorted choices."""

    def of_choices(self, x: torch.Tensor, matrices: Any, blocks: SortedChoices, per_input: int) -> torch.Tensor:
        """Return (S, N), the products of the choices, undefined at a choice of -1. `per_input` choices share each row of x. The blocks
        are filled and have the rows of `rows_of`."""


class Codes(NamedTuple):
    """Integers in words: see `models.weights.grouped.Grouped`."""

    zeros: torch.Tensor | None
    middle: int
    per_word: int
    run: int
    groups: int  # per row


class ExpertOperands(NamedTuple):
    """Inputs of the kernel of `moe`: values and matrices with their scales, if any."""

    inputs: torch.Tensor
    input_scales: torch.Tensor
    matrices: torch.Tensor
    scales: torch.Tensor
    num_scales: int = 0  # scales per row of blocks; 0: unscaled
    scale_stride: int = 0  # between columns of the inputs' scales
    codes: Codes | None = None  # what the matrices hold instead of values


class TritonProducts(Products[S]):
    """See `Products`. For bfloat16 and contiguous tensors."""

    gemv: Callable[..., torch.Tensor] | None = None  # x, matrix, out, norm, whether it is gated, or adds; None: there is none

    @abstractmethod
    def product_of_many(self, x_TX: Activation, matrix: S, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor: ...

    def product(self, x_TX: Activation, matrix: S, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        if self.gemv is None or (single := single_of(x_TX, rows)) is None:
            return self.product_of_many(x_TX, matrix, rows, out_TN)
        x_1X, norm = single
        return self.gemv(x_1X, matrix, x_1X.new_empty((1, width_of(matrix))) if out_TN is None else out_TN, norm)

    def swiglu(self, x_TX: Activation, matrix: S, rows: RowClass) -> torch.Tensor | Rounded:
        if self.gemv is None or (single := single_of(x_TX, rows)) is None:
            return self.swiglu_of_many(x_TX, matrix, rows)
        x_1X, norm = single
        return self.gemv(x_1X, matrix, x_1X.new_empty((1, width_of(matrix) // 2)), norm, gated=True)

    def swiglu_of_many(self, x_TX: Activation, matrix: S, rows: RowClass) -> torch.Tensor | Rounded:
        return self.activated(self.product_of_many(x_TX, matrix, rows, None))

    def add_to(self, residual: Residual, x_TX: Activation, matrix: S, rows: RowClass) -> None:
        if self.gemv is None or (single := single_of(x_TX, rows)) is None:
            self.add_many_to(residual, x_TX, matrix, rows)
        else:
            self.gemv(single[0], matrix, residual.sum_TD, single[1], adds=True)

    def add_many_to(self, residual: Residual, x_TX: Activation, matrix: S, rows: RowClass) -> None:
        residual.add_(self.product_of_many(x_TX, matrix, rows, None)[None])

    def activated(self, gate_up_TN: torch.Tensor) -> torch.Tensor | Rounded:
        """Return silu(first half) * second half in the input format of the next product."""
        return swiglu(gate_up_TN)

    def expert_gemv(self, experts: Experts) -> ExpertGemv | None:
        """Return the products of a single token with its experts, or None to compute it like several tokens."""
        return None

    def expert_products(self, experts: Experts) -> ExpertProducts | None:
        """Return own products of several tokens' choices, or None to use the kernels of `moe`, which need the following methods."""
        return None

    def expert_tiles(self, num_tokens: int, capability: tuple[int, int]) -> ExpertTiles:
        """Return the tiles for `expert_operands`."""
        raise ValueError(f"{type(self).__name__} has no kernels for experts: --backend torch has")

    def expert_operands(self, x_TX: torch.Tensor, matrices: S, num_tokens: int) -> ExpertOperands:
        """Return the operands of a product with stacked experts; x holds tokens, or their choices."""
        raise ValueError(f"{type(self).__name__} has no kernels for experts: --backend torch has")


def triton_products(matrix: Matrix) -> TritonProducts[Any]:
    """Return the products of a matrix of this backend."""
    assert isinstance(matrix.products, TritonProducts)
    return matrix.products


def width_of(matrix: Any) -> int:
    """Return the width of the product."""
    return int(matrix.shape[0])
