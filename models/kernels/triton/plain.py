"""Products of matrices in bfloat16: our GEMV for a single token, cuBLAS for more."""

import torch

from models.kernels.stream import Activation, Residual, RowClass
from models.kernels.triton import expert_gemv
from models.kernels.triton.activations import values_of
from models.kernels.triton.gemv import Norm, gemv
from models.kernels.triton.products import TritonProducts
from models.weights.plain import Plain

SPLITS = 2  # of the inner dimension


class TritonPlain(TritonProducts[Plain]):
    """See `TritonProducts`. Products of several tokens that are added to the residual have few tiles and use split-K."""

    max_chosen = 1 << 30

    def gemv(self, x_1X: torch.Tensor, out_1N: torch.Tensor, norm: Norm | None, gated: bool = False, adds: bool = False) -> torch.Tensor:
        return gemv(x_1X, self.matrix.values, out_1N, norm, gated, adds)

    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        return torch.mm(values_of(x_TX), self.matrix.values.t(), out=out_TN)

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        x_TX, weight = values_of(x_TX), self.matrix.values
        if rows <= RowClass.SEVERAL:
            parts_STX, parts_SXD = x_TX.unflatten(1, (SPLITS, -1)).transpose(0, 1), weight.unflatten(1, (SPLITS, -1)).permute(1, 2, 0)
            out_STD = residual.room(SPLITS, len(x_TX), len(weight), dtype=torch.float32)
            residual.add_(torch.bmm(parts_STX, parts_SXD, out_dtype=torch.float32, out=out_STD))
        else:
            residual.sum_TD.addmm_(x_TX, weight.t())

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        weight = self.matrix.values
        if rows == RowClass.SINGLE:
            return gemv(x_TX, weight, x_TX.new_empty((1, len(weight)), dtype=torch.float32) if out_TN is None else out_TN)
        return torch.mm(x_TX, weight.t(), out_dtype=torch.float32, out=out_TN)

    def expert_swiglu(self, x_1D: torch.Tensor, chosen_K: torch.Tensor) -> torch.Tensor:
        return expert_gemv.expert_swiglu(x_1D, self.matrix, chosen_K, self.count)

    def expert_sum(self, inner_KI: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool) -> None:
        expert_gemv.expert_sum(inner_KI, self.matrix, chosen_K, weights_K, out_1D, adds)
