"""Float8 products: our Triton kernel for few tokens, cuBLAS for more."""

import torch
from torch.nn.functional import ScalingType, scaled_mm

from models.kernels.hopper.tuned import FEW_FLOAT8_TOKENS
from models.kernels.triton import fp8
from models.weights.float8 import BlockScaled, GroupScaled


def multiply(x_TK: GroupScaled, weight_NK: BlockScaled) -> torch.Tensor:
    """x @ weight.T in bfloat16."""
    if len(x_TK) <= FEW_FLOAT8_TOKENS:
        return fp8.multiply(x_TK, weight_NK)
    weight_KN, weight_scales = weight_NK.transposed
    scales = x_TK.scales, ScalingType.BlockWise1x128, weight_scales, ScalingType.BlockWise128x128
    y_TN = scaled_mm(x_TK.padded, weight_KN, *scales, output_dtype=torch.bfloat16)
    return y_TN if len(y_TN) == len(x_TK) else y_TN[: len(x_TK)]
