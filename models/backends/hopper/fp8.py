"""`Fp8Products` on Hopper: our Triton kernel for few tokens, cuBLAS's blocks of 1 x 128 and 128 x 128 for more. Made by the backend."""

from functools import cached_property

import torch
from torch.nn.functional import ScalingType, scaled_mm

from models.backends.hopper.float8_gemv import Float8Gemv
from models.backends.hopper.tuned import FEW_FLOAT8_TOKENS
from models.backends.portable.fp8 import MOST_TOKENS, multiply, multiply_in_parts
from models.layers.fp8 import BlockScaled, GroupScaled


class HopperFp8:
    """See `Fp8Products`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def single(self) -> Float8Gemv:
        return Float8Gemv(self._device)

    def multiply(self, x_TK: GroupScaled, weight_NK: BlockScaled) -> torch.Tensor:
        if len(x_TK) <= FEW_FLOAT8_TOKENS:
            return multiply(x_TK, weight_NK, torch.bfloat16)
        weight_KN, weight_scales = weight_NK.transposed
        scales = x_TK.scales, ScalingType.BlockWise1x128, weight_scales, ScalingType.BlockWise128x128
        y_TN = scaled_mm(x_TK.padded, weight_KN, *scales, output_dtype=torch.bfloat16)
        return y_TN if len(y_TN) == len(x_TK) else y_TN[: len(x_TK)]

    def addends(self, x_TK: GroupScaled, weight_NK: BlockScaled) -> torch.Tensor:
        return multiply_in_parts(x_TK, weight_NK) if len(x_TK) <= MOST_TOKENS else self.multiply(x_TK, weight_NK)[None]
