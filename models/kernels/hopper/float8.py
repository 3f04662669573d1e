"""Float8 products on Hopper: `float8_gemv.cu` for a single token, also with its experts, `float8_rows.cu` for few tokens (our Triton kernel
if there are many rows), cuBLAS for more tokens."""

import math

import torch
from torch.nn.functional import ScalingType

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.stream import Activation, Residual, RowClass
from models.kernels.triton.activations import rounded
from models.kernels.triton.float8 import TritonFloat8
from models.kernels.triton.gemv import Norm
from models.kernels.triton.launch import num_multiprocessors
from models.weights.float8 import BLOCK, BlockScaled, GroupScaled

MAX_CHOSEN = 12
PARTS = 2  # split-K partial sums of a product that is added to the residual
MOST_ROWS = {RowClass.HANDFUL: 240, RowClass.FEW: 288}  # rows of a matrix per multiprocessor up to which `float8_rows.cu` is the fastest
_scaled_mm = torch.ops.aten._scaled_mm_v2.out  # `torch.nn.functional.scaled_mm` has no `out`


def multiply_few(x_TK: GroupScaled, weight_NK: BlockScaled, out_STN: torch.Tensor) -> torch.Tensor:
    """Write split-K partial sums of x @ weight.T in float32 or bfloat16 for up to RowClass.FEW tokens, and return them."""
    x, weight = x_TK.padded.view(torch.uint8), weight_NK.values.view(torch.uint8)
    load_kernel("float8_rows", NO_HEADS).run(x, x_TK.scales, weight, weight_NK.padded_scales, out_STN)
    return out_STN


class HopperFloat8(TritonFloat8):
    """See `TritonFloat8`."""

    has_gemv = True
    max_chosen = MAX_CHOSEN

    def is_early(self, rows: RowClass) -> bool:
        return self.width <= MOST_ROWS.get(rows, 0) * num_multiprocessors(self.matrix.values.device)

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
            return multiply_few(x_TX, self.matrix, out_TN[None])[0]
        if rows <= RowClass.HANDFUL:
            return super().multiply(x_TX, rows, room_PN)
        weight_KN, weight_scales = self.matrix.transposed
        y_TN = x_TX.padded.new_empty((len(x_TX.padded), self.width), dtype=torch.bfloat16) if room_PN is None else room_PN
        _scaled_mm(
            x_TX.padded, weight_KN, [x_TX.scales], [ScalingType.BlockWise1x128.value], [], [weight_scales],
            [ScalingType.BlockWise128x128.value], [], None, torch.bfloat16, out=y_TN,
        )  # fmt: skip
        return y_TN if len(y_TN) == len(x_TX) else y_TN[: len(x_TX)]

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if not self.is_early(rows):
            return super().add_many_to(residual, x_TX, rows)
        x_TX = rounded(x_TX, True)
        num_parts = math.gcd(PARTS, self.matrix.shape[1] // BLOCK)
        residual.add_(multiply_few(x_TX, self.matrix, residual.room(num_parts, len(x_TX), self.width, dtype=torch.float32)))

    def expert_swiglu(self, x_1D: torch.Tensor, chosen_K: torch.Tensor) -> torch.Tensor:
        inner_KI = x_1D.new_empty((len(chosen_K), self.width // self.count // 2))
        return self.gemv(x_1D, inner_KI, None, gated=True, chosen_K=chosen_K)

    def expert_sum(self, inner_KI: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool) -> None:
        kernel, matrix = load_kernel("float8_gemv", NO_HEADS), self.matrix
        kernel.run_sum(inner_KI, matrix.values.view(torch.uint8), matrix.padded_scales, chosen_K, weights_K, out_1D, adds)
