"""Matrices of a model: storage, tensors in a checkpoint, and products. `models.config.formats` registers the formats."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from torch import nn

from models.checkpoint.names import CheckpointTensor
from models.config.formats import Format, MatrixFormat, entry_of
from models.config.registry import imported
from models.config.schemes import Scheme
from models.kernels.stream import Activation, Residual, Rounded, RowClass

WHOLE = 1 << 30  # columns of a block: a value applies to all columns of its rows


class Stored(NamedTuple):
    """A tensor of a matrix. Checkpoints name it by the matrix's name and this suffix; each of its values applies to a block."""

    suffix: str
    tensor: torch.Tensor
    block: tuple[int, int] = (1, 1)  # rows, columns
    is_transposed: bool = False  # whether checkpoints store it transposed
    scalar_shape: tuple[int, ...] | None = None  # shape in checkpoints with a single value for all rows

    def part(self, name: str, shape: tuple[int, int], rows: slice, columns: slice, target: torch.Tensor) -> CheckpointTensor:
        """Return the source of `target`, a part of the tensor: these rows and columns of the checkpoint's matrix of this shape."""
        if self.scalar_shape is not None:
            return CheckpointTensor(name + self.suffix, self.scalar_shape, (), target)
        blocks, index = self.in_blocks(shape, rows, columns)
        if self.is_transposed:
            return CheckpointTensor(name + self.suffix, blocks[::-1], index[::-1], target.t())
        return CheckpointTensor(name + self.suffix, blocks, index, target)

    def in_blocks(self, shape: tuple[int, int], rows: slice, columns: slice) -> tuple[tuple[int, int], tuple[slice, slice]]:
        """Return the shape of a matrix and these rows and columns of it, in blocks."""
        height, width = self.block
        return (-(-shape[0] // height), -(-shape[1] // width)), (in_blocks(rows, height), in_blocks(columns, width))


def in_blocks(cut: slice, block: int) -> slice:
    """Return the blocks that contain these rows or columns."""
    return slice(cut.start // block, -(-cut.stop // block))


class Storage(Protocol):
    """A matrix (N, K) as stored in one format."""

    @staticmethod
    def check(columns: int, rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        """Raise ValueError if matrices of these sizes, which begin at rows `starts` of the checkpoint's, do not consist of whole blocks."""

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Self:
        """Return uninitialised storage; `dtype`: the model's. ValueError as in `check`."""

    @classmethod
    def quantized(cls, matrix_NK: torch.Tensor) -> Self:
        """Convert a matrix in the model's dtype to this format."""

    def in_format(self, format: Format) -> "Storage":
        """Return the matrix in its format after loading, in place if possible."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def stored(self) -> tuple[Stored, ...]:
        """Return the tensors of the checkpoint."""

    def rows(self, first: int, last: int) -> Self:
        """Return a view of these rows, which are whole blocks."""

    def fill_normal_(self, std: float, generator: torch.Generator) -> None:
        """Fill with random values of this standard deviation."""


S = TypeVar("S")


class Products(ABC, Generic[S]):
    """Products with a matrix, or `count` equal stacked ones, of one format on one backend; all that they need is bound here. `rows`: class
    of the number of x's tokens."""

    def __init__(self, matrix: S, count: int = 1) -> None:
        self.matrix, self.count = matrix, count

    def finished(self) -> "Products[Any]":
        """Return the products to use once the matrix is loaded, which may read another form of it."""
        return self

    @abstractmethod
    def product(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ matrix.T, in `out_TN` if given."""

    @abstractmethod
    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ matrix.T in float32: rounded logits would have ties."""

    @abstractmethod
    def swiglu(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        """Return silu(first half) * second half of x @ matrix.T, as input of a matrix of the same format."""

    @abstractmethod
    def add_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        """residual += x @ matrix.T."""


class HasModules(Protocol):
    """A model, or a part of one."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...


class Place(NamedTuple):
    backend: str
    device: torch.device
    dtype: torch.dtype


class Matrix:
    """A matrix (N, K) in its current format, with the methods of its `Products`."""

    def __init__(self, storage: Any, format: MatrixFormat, backend: str, count: int = 1, dtype: torch.dtype = torch.bfloat16) -> None:
        self.storage, self._format, self._backend, self._count = storage, format.stored, backend, count
        self._loaded, self._dtype = format, dtype
        self._is_converted = False  # whether `finish` has converted it
        self.bind(products_of(format.stored, backend)(storage, count))

    @classmethod
    def empty(cls, rows: int, columns: int, format: MatrixFormat, place: Place, count: int = 1) -> "Matrix":
        """Return an uninitialised matrix, or `count` equal stacked ones. ValueError if one of its formats does not support the size."""
        for each in set(format):
            storage_of(each).check(columns, (rows,))
        return cls(storage_of(format.stored).empty(rows, columns, place.device, place.dtype), format, place.backend, count, place.dtype)

    @classmethod
    def of(cls, matrix_NK: torch.Tensor, backend: str, format: Format = "plain", count: int = 1) -> "Matrix":
        return cls(storage_of(format).quantized(matrix_NK), MatrixFormat(format, format), backend, count)

    def bind(self, products: Products[Any]) -> None:
        """Multiply by these products from now on, which a caller may also wrap."""
        self.products = products
        self.product, self.product_f32, self.swiglu, self.add_to = products.product, products.product_f32, products.swiglu, products.add_to

    @property
    def format(self) -> Format:
        return self._format

    @property
    def _is_open(self) -> bool:
        """Return whether `storage` is what `finish` converts, not what products read."""
        return self.storage is not self.products.matrix

    @property
    def shape(self) -> torch.Size:
        return self.storage.shape

    def tensors(self, name: str, shape: tuple[int, int], rows: slice, columns: slice, target_rows: slice) -> Iterator[CheckpointTensor]:
        """Yield the sources of rows `target_rows`: these rows and columns of the checkpoint's matrix of this shape."""
        for stored in self.storage.stored:
            yield stored.part(name, shape, rows, columns, stored.tensor[in_blocks(target_rows, stored.block[0])])

    def finish(self) -> None:
        """Quantize in place after loading. The first call must precede any graph capture; after `reopen`, addresses stay the same."""
        if self._is_converted and not self._is_open:
            return
        final = self._loaded.final
        made = self.storage if final == self._loaded.stored else self.storage.in_format(final)
        products = products_of(final, self._backend)(made, self._count).finished()
        if self._is_open:
            for old, new in zip(self.products.matrix.stored, products.matrix.stored, strict=True):
                old.tensor.copy_(new.tensor)
        elif products.matrix is not self.storage:
            self._is_converted, self._format = True, final
            self.bind(products)
        self.close()

    def reopen(self, device: torch.device) -> None:
        """Accept the tensors of a checkpoint again, until `finish` or `close`. Meanwhile products are not available."""
        if self._is_converted:
            assert not self._is_open and self.storage.stored
            rows, columns = self.storage.shape
            self.storage = storage_of(self._loaded.stored).empty(rows, columns, device, self._dtype)

    def close(self) -> None:
        """Undo `reopen`."""
        self.storage = self.products.matrix


def matrices_of(module: HasModules) -> Iterator[tuple[str, Matrix]]:
    for path, each in module.named_modules():
        yield from ((f"{path}.{name}", matrix) for name, matrix in vars(each).items() if isinstance(matrix, Matrix))


@cache
def storage_of(format: Format) -> type[Storage]:
    """Return the storage class of a format, or the factory of a scheme."""
    found: Any = imported(entry_of(format).storage)
    return found if (scheme := Scheme.parse(format)) is None else found(scheme)


@cache
def products_of(format: Format, backend: str) -> Callable[[Any, int], Products[Any]]:
    """Return the class. ValueError if the backend has none for the format."""
    if (name := entry_of(format).products.get(backend)) is None:
        raise ValueError(f"--backend {backend} has no products of {format} matrices: --backend torch has")
    products: Callable[[Any, int], Products[Any]] = imported(name)
    return products
