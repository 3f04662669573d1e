"""Products of matrices on NVIDIA GPUs: a GEMV with a fused norm for a single token, or a product for several."""

from abc import abstractmethod
from typing import Any, TypeVar

import torch

from models.kernels.ops import Experts
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import single_of
from models.kernels.triton.gemv import Norm
from models.kernels.triton.moe import Room, sparse_swiglu
from models.kernels.triton.text import swiglu
from models.weights.float8 import GroupScaled
from models.weights.matrix import Matrix, Products

S = TypeVar("S")


class TritonProducts(Products[S]):
    """See `Products`. For bfloat16 and contiguous tensors."""

    has_gemv = True
    max_chosen = 0  # most experts of a single token that `expert_swiglu` and `expert_sum` multiply; 0: they are not available

    def __init__(self, matrix: S, count: int = 1) -> None:
        super().__init__(matrix, count)
        self.width: int = matrix.shape[0]  # type: ignore[attr-defined]

    @abstractmethod
    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor: ...

    def gemv(self, x_1X: torch.Tensor, out_1N: torch.Tensor, norm: Norm | None, gated: bool = False, adds: bool = False) -> torch.Tensor:
        """See `models.kernels.triton.gemv.gemv`."""
        raise NotImplementedError

    def product(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        if not self.has_gemv or (single := single_of(x_TX, rows)) is None:
            return self.product_of_many(x_TX, rows, out_TN)
        x_1X, norm = single
        return self.gemv(x_1X, x_1X.new_empty((1, self.width)) if out_TN is None else out_TN, norm)

    def swiglu(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        if not self.has_gemv or (single := single_of(x_TX, rows)) is None:
            return self.swiglu_of_many(x_TX, rows)
        x_1X, norm = single
        return self.gemv(x_1X, x_1X.new_empty((1, self.width // 2)), norm, gated=True)

    def swiglu_of_many(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        return swiglu(self.product_of_many(x_TX, rows, None))

    def add_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if not self.has_gemv or (single := single_of(x_TX, rows)) is None:
            self.add_many_to(residual, x_TX, rows)
        else:
            self.gemv(single[0], residual.sum_TD, single[1], adds=True)

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        residual.add_(self.product_of_many(x_TX, rows, residual.room(1, len(residual.sum_TD), self.width)[0])[None])

    def expert_swiglu(self, x_1D: torch.Tensor, chosen_K: torch.Tensor) -> torch.Tensor:
        """Return (K, I), silu(gate) * up of a token's chosen experts; undefined at a choice of -1."""
        raise NotImplementedError

    def expert_sum(self, inner_KI: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool) -> None:
        """Write or add to `out_1D` the sum of weight * matrix @ inner over the choices other than -1."""
        raise NotImplementedError

    def sparse_swiglu(
        self, x_TD: torch.Tensor | GroupScaled, logits_STE: torch.Tensor, counts_E: torch.Tensor, experts: Experts,
        valid_T: torch.Tensor | None, room: Room,
    ) -> torch.Tensor:  # fmt: skip
        """Return (S, T, D) in `room`, see `Ops`, for `experts.gate_up` of these products. Logits and counts: see `route`."""
        return sparse_swiglu(x_TD, logits_STE, counts_E, experts, valid_T, room)


def triton_products(matrix: Matrix) -> TritonProducts[Any]:
    """Return the products of a matrix of this backend."""
    assert isinstance(matrix.products, TritonProducts)
    return matrix.products
