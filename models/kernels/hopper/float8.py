"""Float8 products on Hopper: our CUDA kernel for a single token, our Triton kernel for few, cuBLAS for more."""

import torch
from torch.nn.functional import ScalingType

from models.kernels.hopper import float8_gemv
from models.kernels.stream import RowClass
from models.kernels.triton.float8 import TritonFloat8
from models.kernels.triton.gemv import Norm
from models.weights.float8 import GroupScaled

_scaled_mm = torch.ops.aten._scaled_mm_v2.out  # `torch.nn.functional.scaled_mm` has no `out`


class HopperFloat8(TritonFloat8):
    """See `TritonFloat8`."""

    has_gemv = True
    max_chosen = float8_gemv.MAX_CHOSEN

    def gemv(self, x_1X: torch.Tensor, out_1N: torch.Tensor, norm: Norm | None, gated: bool = False, adds: bool = False) -> torch.Tensor:
        return float8_gemv.gemv(x_1X, self.matrix, out_1N, norm, gated, adds)

    def multiply(self, x_TX: GroupScaled, rows: RowClass, room_PN: torch.Tensor | None = None) -> torch.Tensor:
        if rows <= RowClass.FEW:
            return super().multiply(x_TX, rows, room_PN)
        weight_KN, weight_scales = self.matrix.transposed
        y_TN = x_TX.padded.new_empty((len(x_TX.padded), self.width), dtype=torch.bfloat16) if room_PN is None else room_PN
        _scaled_mm(
            x_TX.padded, weight_KN, [x_TX.scales], [ScalingType.BlockWise1x128.value], [], [weight_scales],
            [ScalingType.BlockWise128x128.value], [], None, torch.bfloat16, out=y_TN,
        )  # fmt: skip
        return y_TN if len(y_TN) == len(x_TX) else y_TN[: len(x_TX)]

    def expert_swiglu(self, x_1D: torch.Tensor, chosen_K: torch.Tensor) -> torch.Tensor:
        return float8_gemv.expert_swiglu(x_1D, self.matrix, chosen_K, self.count)

    def expert_sum(self, inner_KI: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool) -> None:
        float8_gemv.expert_sum(inner_KI, self.matrix, chosen_K, weights_K, out_1D, adds)
