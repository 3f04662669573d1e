"""Matrices in the model's dtype."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.config.formats import Format
from models.kernels.reference.products import TorchProducts
from models.weights.matrix import Storage, Stored, storage_of


@dataclass(frozen=True, slots=True)
class Plain:
    """See `Storage`."""

    values: torch.Tensor

    @staticmethod
    def check(columns: int, rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        """Accept every size."""

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> "Plain":
        return cls(torch.empty((rows, columns), dtype=dtype, device=device))

    @classmethod
    def quantized(cls, matrix_NK: torch.Tensor) -> "Plain":
        return cls(matrix_NK)

    def in_format(self, format: Format) -> Storage:
        return storage_of(format).quantized(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def stored(self) -> tuple[Stored, ...]:
        return (Stored(".weight", self.values),)

    def rows(self, first: int, last: int) -> "Plain":
        return Plain(self.values[first:last])

    def fill_normal_(self, std: float, generator: torch.Generator) -> None:
        self.values.normal_(std=std, generator=generator)


class TorchPlain(TorchProducts[Plain]):
    """See `TorchProducts`."""

    def multiply(self, x_TX: torch.Tensor) -> torch.Tensor:
        return x_TX @ self.matrix.values.to(x_TX.dtype).t()
