"""The decoder's norm."""

import torch
from torch import nn

from models.backends.ops import Activation, Ops, Residual
from models.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; whole on every rank."""

    def __init__(self, size: int, eps: float, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, residual: Residual) -> Activation:
        """The normalised stream, for the products of one layer."""
        return self.ops.normed(residual, self.weight, self.eps)

    def values(self, residual: Residual) -> torch.Tensor:
        """The normalised stream, (T, D)."""
        return self.ops.rms_norm(residual, self.weight, self.eps)
