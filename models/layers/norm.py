"""The decoder's norm."""

import torch
from torch import nn

from models.backends.ops import Normed, Residual
from models.layers.linear import empty_parameter


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; whole on every rank."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, residual: Residual) -> Normed:
        """The normalised stream, for the products of one layer."""
        return Normed(residual, self.weight, self.eps)
