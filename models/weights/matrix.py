"""Formats of matrices: how one lies on the device and in checkpoints. A format is a file here and a line of FORMATS; its products are in
`models.kernels`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from models.checkpoint.names import CheckpointTensor
from models.config.types import Format
from models.weights.float8 import Float8Block, Stored, Weight
from models.weights.plain import Plain


class MatrixFormat(Protocol):
    def holds(self, weight: Weight) -> bool:
        """Whether a matrix has this format."""

    def check(self, columns: int, rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        """ValueError if matrices with so many columns and rows, that begin at these rows of the checkpoint's, are not whole blocks."""

    def empty(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Weight:
        """A matrix without values. ValueError as `check`."""

    def stored(self, weight: Weight) -> tuple[Stored, ...]:
        """Its tensors."""

    def converted(self, matrix_NK: torch.Tensor) -> Weight:
        """A matrix in the model's dtype in this format."""


FORMATS: Mapping[Format, MatrixFormat] = {"plain": Plain(), "float8": Float8Block()}


def stored(weight: Weight) -> tuple[Stored, ...]:
    """The tensors of a matrix of any format."""
    return next(format.stored(weight) for format in FORMATS.values() if format.holds(weight))


def matrix_tensors(
    name: str, weight: Weight, shape: tuple[int, int], rows: slice, columns: slice, target_rows: slice
) -> Iterator[CheckpointTensor]:
    """Rows `target_rows` of `weight` are these rows and columns of the checkpoint's matrix of this shape."""
    for suffix, block, tensor in stored(weight):
        row, column, target = (slice(cut.start // block, cut.stop // block) for cut in (rows, columns, target_rows))
        blocks = -(-shape[0] // block), -(-shape[1] // block)
        yield CheckpointTensor(f"{name}.weight{suffix}", blocks, (row, column), tensor[target])


def convert_(layer: nn.Module, format: Format, name: str = "weight") -> None:
    """The layer's matrix of this name gets another format."""
    matrix = layer.get_parameter(name)
    delattr(layer, name)  # a registered parameter does not give way to anything else
    setattr(layer, name, FORMATS[format].converted(matrix))
