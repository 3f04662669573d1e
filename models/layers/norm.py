"""The decoder's norm. Used by `models.text`."""

import torch
from torch import nn

from models.backends.ops import Ops
from models.layers.parallel import empty_parameter


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension; whole on every rank."""

    def __init__(self, size: int, eps: float, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.eps = eps
        self.ops = ops
        self.weight = empty_parameter(size, dtype=dtype, device=device)

    def forward(self, x_TD: torch.Tensor, addends_STD: torch.Tensor | None = None) -> torch.Tensor:
        """As `Ops.rms_norm`."""
        return self.ops.rms_norm(x_TD, self.weight, self.eps, addends_STD)
