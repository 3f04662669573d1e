"""Matrix products in plain torch; each format implements `multiply`."""

from abc import abstractmethod
from typing import TypeVar

import torch
import torch.nn.functional as F

from models.kernels.reference.norms import values_of
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.weights.matrix import Products

S = TypeVar("S")


class TorchProducts(Products[S]):
    """See `Products`. Row classes have no effect."""

    @abstractmethod
    def multiply(self, x_TX: torch.Tensor) -> torch.Tensor:
        """Return x @ matrix.T in x's dtype."""

    def product(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        y_TN = self.multiply(values_of(x_TX))
        return y_TN if out_TN is None else out_TN.copy_(y_TN)

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        y_TN = self.multiply(x_TX.float())
        return y_TN if out_TN is None else out_TN.copy_(y_TN)

    def swiglu(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        gate, up = self.product(x_TX, rows).chunk(2, dim=-1)
        return F.silu(gate) * up

    def add_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        residual.sum_TD.add_(self.product(x_TX, rows))
