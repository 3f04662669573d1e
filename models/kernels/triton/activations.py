"""Inputs of products: values, a norm fused into the product, or float8 values."""

import torch

from models.kernels.stream import Activation, Normed, RowClass
from models.kernels.triton.gemv import Norm
from models.kernels.triton.text import quantized, rms_norm
from models.weights.float8 import GroupScaled


def single_of(x_TX: Activation, rows: RowClass) -> tuple[torch.Tensor, Norm | None] | None:
    """Return the vector and its pending norm if there is one token and at most one pending addend."""
    if rows != RowClass.SINGLE:
        return None
    if isinstance(x_TX, torch.Tensor):
        return x_TX, None
    if not isinstance(x_TX, Normed):
        return None
    if (parts_STD := x_TX.parts_STD) is not None:
        if len(parts_STD) > 1:
            return None
        x_TX.stream_TD.add_(parts_STD[0])
    return x_TX.stream_TD, (x_TX.weight_D, x_TX.eps)


def values_of(x_TX: Activation, is_early: bool = False) -> torch.Tensor:
    """`is_early`: see `rms_norm`."""
    if isinstance(x_TX, Normed):
        rms_norm(x_TX, values_TD := torch.empty_like(x_TX.stream_TD), is_early=is_early)
        return values_TD
    assert isinstance(x_TX, torch.Tensor)
    return x_TX


def inputs_of_experts(x_TD: Normed, is_rounded: bool, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | GroupScaled]:
    """Return values, and these or float8 values; clear `counts`, see `rms_norm`."""
    values_TD, made = torch.empty_like(x_TD.stream_TD), GroupScaled.like(x_TD.stream_TD) if is_rounded else None
    rms_norm(x_TD, values_TD, made, counts, is_early=True)
    return values_TD, values_TD if made is None else made


def rounded(x_TX: Activation, is_early: bool = False) -> GroupScaled:
    """Return float8 values. `is_early`: see `rms_norm`."""
    if isinstance(x_TX, Normed):
        rms_norm(x_TX, None, made := GroupScaled.like(x_TX.stream_TD), is_early=is_early)
        return made
    if isinstance(x_TX, torch.Tensor):
        return quantized(x_TX, is_early)
    assert isinstance(x_TX, GroupScaled)
    return x_TX
