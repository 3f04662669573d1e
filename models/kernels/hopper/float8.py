"""Float8 products on Hopper: our CUDA kernel for a single token, our Triton kernel for few, cuBLAS for more."""

import torch
from torch.nn.functional import ScalingType, scaled_mm

from models.kernels.hopper import float8_gemv
from models.kernels.ops import Experts
from models.kernels.stream import RowClass
from models.kernels.triton.float8 import TritonFloat8, multiply
from models.kernels.triton.products import ExpertGemv
from models.weights.float8 import BlockScaled, GroupScaled


class HopperFloat8(TritonFloat8):
    """See `TritonFloat8`."""

    gemv = staticmethod(float8_gemv.gemv)

    def multiply(self, x_TX: GroupScaled, matrix: BlockScaled, rows: RowClass) -> torch.Tensor:
        if rows <= RowClass.FEW:
            return multiply(x_TX, matrix)
        weight_KN, weight_scales = matrix.transposed
        scales = x_TX.scales, ScalingType.BlockWise1x128, weight_scales, ScalingType.BlockWise128x128
        y_TN = scaled_mm(x_TX.padded, weight_KN, *scales, output_dtype=torch.bfloat16)
        return y_TN if len(y_TN) == len(x_TX) else y_TN[: len(x_TX)]

    def expert_gemv(self, experts: Experts) -> ExpertGemv | None:
        return float8_gemv if experts.num_given <= float8_gemv.MAX_CHOSEN else None
