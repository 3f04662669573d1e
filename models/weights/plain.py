"""Matrices in the model's dtype."""

from collections.abc import Sequence

import torch
from torch import nn

from models.weights.float8 import Stored, Weight


class Plain:
    """See `MatrixFormat`."""

    def holds(self, weight: Weight) -> bool:
        return isinstance(weight, torch.Tensor)

    def check(self, columns: int, rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        """Any size fits."""

    def empty(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
        return nn.Parameter(torch.empty((rows, columns), dtype=dtype, device=device), requires_grad=False)

    def stored(self, weight: Weight) -> tuple[Stored, ...]:
        assert isinstance(weight, torch.Tensor)
        return (Stored("", 1, weight.data),)

    def converted(self, matrix_NK: torch.Tensor) -> torch.Tensor:
        return matrix_NK
