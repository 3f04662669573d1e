"""Float8 products on Hopper: `float8_gemv.cu` for a single token, also with its experts, `few_rows.cu` for few tokens, cuBLAS for more."""

import torch
from torch.nn.functional import ScalingType

from models.kernels.hopper import few_rows
from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.stream import Activation, Residual, RowClass
from models.kernels.triton.activations import rounded
from models.kernels.triton.float8 import TritonFloat8
from models.kernels.triton.gemv import Norm
from models.weights.float8 import GroupScaled

MAX_CHOSEN = 12
_scaled_mm = torch.ops.aten._scaled_mm_v2.out  # `torch.nn.functional.scaled_mm` has no `out`


class HopperFloat8(TritonFloat8):
    """See `TritonFloat8`."""

    has_gemv = True
    max_chosen = MAX_CHOSEN

    def is_early(self, rows: RowClass) -> bool:
        return rows <= RowClass.FEW

    def gemv(
        self, x_1X: torch.Tensor, out: torch.Tensor, norm: Norm | None, gated: bool = False, adds: bool = False,
        chosen_K: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """See `TritonProducts`; with `chosen_K`, by the matrix of each of these experts."""
        (norm_weight, eps), matrix = norm or (None, 0.0), self.matrix
        kernel, values = load_kernel("float8_gemv", NO_HEADS), matrix.values.view(torch.uint8)
        kernel.run(x_1X, norm_weight, eps, values, matrix.padded_scales, chosen_K, out, gated, adds)
        return out

    def multiply(self, x_TX: GroupScaled, rows: RowClass, room_PN: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_early(rows):
            out_TN = x_TX.padded.new_empty((len(x_TX), self.width), dtype=torch.bfloat16) if room_PN is None else room_PN[: len(x_TX)]
            return few_rows.multiply(x_TX, self.matrix, out_TN)
        weight_KN, weight_scales = self.matrix.transposed
        y_TN = x_TX.padded.new_empty((len(x_TX.padded), self.width), dtype=torch.bfloat16) if room_PN is None else room_PN
        _scaled_mm(
            x_TX.padded, weight_KN, [x_TX.scales], [ScalingType.BlockWise1x128.value], [], [weight_scales],
            [ScalingType.BlockWise128x128.value], [], None, torch.bfloat16, out=y_TN,
        )  # fmt: skip
        return y_TN if len(y_TN) == len(x_TX) else y_TN[: len(x_TX)]

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if self.is_early(rows):
            few_rows.add(residual, rounded(x_TX, True), self.matrix)
        else:
            super().add_many_to(residual, x_TX, rows)

    def expert_swiglu(self, x_1D: torch.Tensor, chosen_K: torch.Tensor) -> torch.Tensor:
        inner_KI = x_1D.new_empty((len(chosen_K), self.width // self.count // 2))
        return self.gemv(x_1D, inner_KI, None, gated=True, chosen_K=chosen_K)

    def expert_sum(self, inner_KI: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool) -> None:
        kernel, matrix = load_kernel("float8_gemv", NO_HEADS), self.matrix
        kernel.run_sum(inner_KI, matrix.values.view(torch.uint8), matrix.padded_scales, chosen_K, weights_K, out_1D, adds)
