"""Matrices of a model: how one is stored, which tensors of a checkpoint it comes from, and its products.

`models.config.formats` registers the formats. A format's `Storage`, and its `Products` in plain torch, are a file here; products of other
backends are in `models.kernels`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import nn

from models.checkpoint.names import CheckpointTensor
from models.config.formats import Format, MatrixFormat, entry_of
from models.config.registry import imported
from models.config.schemes import Scheme
from models.kernels.stream import Activation, Residual, Rounded, RowClass

WHOLE = 1 << 30  # columns of a block: a value stands for all columns of its rows


class Stored(NamedTuple):
    """A tensor of a matrix. Checkpoints have it under the matrix's name with this suffix; one of its values stands for a block."""

    suffix: str
    tensor: torch.Tensor
    block: tuple[int, int] = (1, 1)  # rows, columns
    is_transposed: bool = False  # in checkpoints
    scalar_shape: tuple[int, ...] | None = None  # in checkpoints, if these have one value, which all rows get

    def part(self, name: str, shape: tuple[int, int], rows: slice, columns: slice, target: torch.Tensor) -> CheckpointTensor:
        """`target`, a part of the tensor, is these rows and columns of the checkpoint's matrix of this shape."""
        if self.scalar_shape is not None:
            return CheckpointTensor(name + self.suffix, self.scalar_shape, (), target)
        (height, width), index = self.block, (in_blocks(rows, self.block[0]), in_blocks(columns, self.block[1]))
        blocks = -(-shape[0] // height), -(-shape[1] // width)
        if self.is_transposed:
            return CheckpointTensor(name + self.suffix, blocks[::-1], index[::-1], target.t())
        return CheckpointTensor(name + self.suffix, blocks, index, target)


def in_blocks(cut: slice, block: int) -> slice:
    """The blocks that hold these rows or columns."""
    return slice(cut.start // block, -(-cut.stop // block))


class Storage(Protocol):
    """A matrix (N, K) as one format stores it."""

    @staticmethod
    def check(columns: int, rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        """ValueError if matrices with so many columns and rows, that begin at these rows of the checkpoint's, are not whole blocks."""

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Self:
        """Without values; `dtype` is the model's. ValueError as `check`."""

    @classmethod
    def quantized(cls, matrix_NK: torch.Tensor) -> Self:
        """A matrix in the model's dtype in this format."""

    def in_format(self, format: Format) -> "Storage":
        """The matrix in the format that it has after a load, in place where it can be."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def stored(self) -> tuple[Stored, ...]:
        """The tensors of the checkpoint."""

    def rows(self, first: int, last: int) -> Self:
        """A view of these rows, which are whole blocks."""

    def fill_normal_(self, std: float, generator: torch.Generator) -> None:
        """Random values of this standard deviation."""


S = TypeVar("S")


class Products(ABC, Generic[S]):
    """Products with matrices of one format on one backend. `rows` is the class of x's tokens."""

    def prepared(self, matrix: S) -> S:
        """What the products of a single matrix read, made once after a load."""
        return matrix

    @abstractmethod
    def product(self, x_TX: Activation, matrix: S, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        """See `Matrix`, as the others."""

    @abstractmethod
    def product_f32(self, x_TX: torch.Tensor, matrix: S, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor: ...

    @abstractmethod
    def swiglu(self, x_TX: Activation, matrix: S, rows: RowClass) -> torch.Tensor | Rounded: ...

    @abstractmethod
    def add_to(self, residual: Residual, x_TX: Activation, matrix: S, rows: RowClass) -> None: ...


class HasModules(Protocol):
    """A model, or a part of one."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


class Place(NamedTuple):
    backend: str
    device: torch.device
    dtype: torch.dtype


class Matrix:
    """A matrix (N, K) in the format that it has now."""

    def __init__(self, storage: Any, format: MatrixFormat, backend: str, count: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        self.storage, self._format, self._backend, self._count = storage, format, backend, count
        self._loaded, self._dtype = format, dtype
        self._kept: Any = None  # the storage that `finish` writes, after `reopen`
        self._is_converted = False  # by `finish`
        self.products = products_of(format.stored, backend)

    @classmethod
    def empty(cls, rows: int, columns: int, format: MatrixFormat, place: Place, count: int = 1) -> "Matrix":
        """Without values; `count` equal ones that lie below each other. ValueError if a format that it comes to has no such matrices."""
        for each in set(format):
            storage_of(each).check(columns, (rows,))
        return cls(storage_of(format.stored).empty(rows, columns, place.device, place.dtype), format, place.backend, count, place.dtype)

    @classmethod
    def of(cls, matrix_NK: torch.Tensor, backend: str, format: Format = "plain") -> "Matrix":
        return cls(storage_of(format).quantized(matrix_NK), MatrixFormat(format, format), backend)

    @property
    def format(self) -> Format:
        return self._format.stored

    @property
    def shape(self) -> torch.Size:
        return self.storage.shape

    def on(self, backend: str) -> "Matrix":
        """The same matrix, multiplied by another backend."""
        return Matrix(self.storage, self._format, backend)

    def rows(self, first: int, last: int) -> "Matrix":
        """A view of these rows, which are whole blocks."""
        return Matrix(self.storage.rows(first, last), self._format, self._backend)

    def tensors(self, name: str, shape: tuple[int, int], rows: slice, columns: slice, target_rows: slice) -> Iterator[CheckpointTensor]:
        """Rows `target_rows` are these rows and columns of the checkpoint's matrix of this shape."""
        for stored in self.storage.stored:
            yield stored.part(name, shape, rows, columns, stored.tensor[in_blocks(target_rows, stored.block[0])])

    def finish(self) -> None:
        """After a load: quantize in place. The first time nothing may have been captured; after `reopen`, addresses stay."""
        if self._is_converted and self._kept is None:
            return
        made, final = self.storage, self._loaded.final
        if final != self._loaded.stored:
            made = made.in_format(final)
            self._format = MatrixFormat(final, final)
            self.products = products_of(final, self._backend)
        if self._count == 1:
            made = self.products.prepared(made)
        if self._kept is not None:
            copy_values(self._kept, made)
            made, self._kept = self._kept, None
        self._is_converted, self.storage = self._is_converted or made is not self.storage, made

    def reopen(self, device: torch.device) -> None:
        """Take the tensors of a checkpoint again, until `finish` or `close`. It computes no products meanwhile."""
        if self._is_converted:
            assert self._kept is None and self.storage.stored
            self._kept, (rows, columns) = self.storage, self.storage.shape
            self.storage = storage_of(self._loaded.stored).empty(rows, columns, device, self._dtype)

    def close(self) -> None:
        """Undo `reopen`."""
        if self._kept is not None:
            self.storage, self._kept = self._kept, None

    def product(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        """x @ matrix.T, in `out_TN` if given."""
        return self.products.product(x_TX, self.storage, rows, out_TN)

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        """The same in float32, since rounded logits would tie."""
        return self.products.product_f32(x_TX, self.storage, rows, out_TN)

    def swiglu(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        """silu(first half) * second half of x @ matrix.T, for a matrix of the same format."""
        return self.products.swiglu(x_TX, self.storage, rows)

    def add_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        """residual += x @ matrix.T."""
        assert residual.parts_STD is None, "the partial sums of the previous product were not added"
        self.products.add_to(residual, x_TX, self.storage, rows)


def copy_values(target: Storage, made: Storage) -> None:
    """Copy a matrix of the same format and size in place."""
    for old, new in zip(target.stored, made.stored, strict=True):
        old.tensor.copy_(new.tensor)


def matrices_of(module: HasModules) -> Iterator[tuple[str, Matrix]]:
    for path, each in module.named_modules():
        yield from ((f"{path}.{name}", matrix) for name, matrix in vars(each).items() if isinstance(matrix, Matrix))


@cache
def storage_of(format: Format) -> type[Storage]:
    """The class, or what makes its instances for a scheme."""
    found: Any = imported(entry_of(format).storage)
    return found if (scheme := Scheme.parse(format)) is None else found(scheme)


@cache
def products_of(format: Format, backend: str) -> Products[Any]:
    """ValueError if the backend has none."""
    if (name := entry_of(format).products_of(backend)) is None:
        raise ValueError(f"--backend {backend} has no products of {format} matrices: --backend torch has")
    products: Products[Any] = imported(name)()
    return products
