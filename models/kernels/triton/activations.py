"""What products take: values, a norm that is computed with the product, or values in float8."""

import torch

from models.kernels.ops import Activation, Normed
from models.kernels.triton.gemv import Norm
from models.kernels.triton.text import quantized, rms_norm, rms_norm_quantized
from models.weights.float8 import GroupScaled


def single_of(x_TX: Activation) -> tuple[torch.Tensor, Norm | None] | None:
    """A vector and the norm that it still lacks, if there is one token, and its stream lacks at most one addend."""
    if isinstance(x_TX, torch.Tensor):
        return (x_TX, None) if len(x_TX) == 1 else None
    if isinstance(x_TX, GroupScaled):
        return None
    residual = x_TX.residual
    if len(residual.sum_TD) > 1 or (residual.parts_STD is not None and len(residual.parts_STD) > 1):
        return None
    if (parts_STD := residual.take_parts()) is not None:
        residual.sum_TD.add_(parts_STD[0])
    return residual.sum_TD, (x_TX.weight_D, x_TX.eps)


def values_of(x_TX: Activation) -> torch.Tensor:
    assert not isinstance(x_TX, GroupScaled)
    if isinstance(x_TX, Normed):
        return rms_norm(x_TX.residual.sum_TD, x_TX.weight_D, x_TX.eps, x_TX.residual.take_parts())
    return x_TX


def rounded(x_TX: Activation) -> GroupScaled:
    if isinstance(x_TX, Normed):
        return rms_norm_quantized(x_TX.residual.sum_TD, x_TX.weight_D, x_TX.eps, x_TX.residual.take_parts())
    return x_TX if isinstance(x_TX, GroupScaled) else quantized(x_TX)
