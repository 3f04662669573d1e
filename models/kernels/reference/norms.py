"""RMSNorm in plain torch."""

import torch

from models.kernels.stream import Activation, Normed


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / sqrt(mean(x ** 2) + eps) * weight over the last dimension."""
    values = x.float()
    return (values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def values_of(x_TX: Activation) -> torch.Tensor:
    """Return the values. Computing those of a norm also writes its stream."""
    if isinstance(x_TX, Normed):
        if x_TX.parts_STD is not None:
            x_TX.stream_TD.add_(x_TX.parts_STD.sum(0))
        return rms_norm(x_TX.stream_TD, x_TX.weight_D, x_TX.eps)
    assert isinstance(x_TX, torch.Tensor)
    return x_TX
