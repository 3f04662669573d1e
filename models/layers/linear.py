"""Linear layers and the embedding, whole or split over the ranks, and their matrices in a checkpoint."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.checkpoint.names import CheckpointTensor
from models.config.formats import Format, MatrixFormat
from models.kernels.backend import Backend
from models.kernels.ops import Ops
from models.kernels.stream import Activation, Residual, RowClass
from models.parallel.group import TensorParallel
from models.weights.matrix import Matrix, Place, Products, products_of, storage_of


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start : start + rows` of the checkpoint's matrix `name`, which has `total_rows` rows."""

    name: str
    total_rows: int
    start: int
    rows: int


def even_part(name: str, total_rows: int, tp: TensorParallel) -> Part:
    """Return this rank's share of a matrix that is divided evenly over the ranks."""
    rows = tp.share(total_rows, name)
    return Part(name, total_rows, tp.rank * rows, rows)


def placed(parts: Sequence[Part]) -> Iterator[tuple[Part, slice]]:
    """Return each part and its rows of the joined matrix."""
    end = 0
    for part in parts:
        end += part.rows
        yield part, slice(end - part.rows, end)


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings shared by a model's layers. Parameters are uninitialised and without gradient."""

    tp: TensorParallel
    ops: Ops
    place: Place
    norm_offset: float = 0.0  # difference between the factor and a norm of the checkpoint

    @classmethod
    def on(cls, backend: Backend, tp: TensorParallel, dtype: torch.dtype, norm_offset: float = 0.0) -> "Setup":
        return cls(tp, backend.ops, Place(backend.name, backend.device, dtype), norm_offset)

    def parameter(self, *shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=dtype or self.place.dtype, device=self.place.device), requires_grad=False)


class Linear(nn.Module):
    """A whole linear layer with bias, the same on every rank."""

    def __init__(self, in_features: int, out_features: int, setup: Setup) -> None:
        super().__init__()
        self.weight = setup.parameter(out_features, in_features)
        self.bias = setup.parameter(out_features)
        self.change: Callable[[torch.Tensor], torch.Tensor] | None = None  # of an adapter

    def matrix(self) -> torch.Tensor:
        """Return the weight with the change of an adapter."""
        return self.weight if self.change is None else self.change(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.matrix(), self.bias)


class FusedColumnParallelLinear(nn.Module):
    """Several matrices of the checkpoint with the same input, stored as one; the caller multiplies."""

    def __init__(self, in_features: int, parts: Sequence[Part], format: MatrixFormat, setup: Setup) -> None:
        super().__init__()
        self.parts = parts
        for each in format:
            storage_of(each).check(in_features, [part.rows for part in parts], [part.start for part in parts])
        self.weight = Matrix.empty(sum(part.rows for part in parts), in_features, format, setup.place)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """The matrices are siblings of this layer in the checkpoint."""
        parent, width = prefix.rpartition(".")[0], self.weight.shape[1]
        for part, own in placed(self.parts):
            rows = slice(part.start, part.start + part.rows)
            yield from self.weight.tensors(f"{parent}.{part.name}", (part.total_rows, width), rows, slice(0, width), own)


def add_sum_(
    residual: Residual,
    tp: TensorParallel,
    width: int,
    compute: Callable[[torch.Tensor | None], torch.Tensor],
    parts_STD: torch.Tensor | None = None,
) -> None:
    """residual += the sum over the ranks of the result of `compute(out)`, which it writes to `out` (T, width), or returns if `out` is None.
    `parts_STD`: the partial sums that `compute` adds, if any. The next norm must read the sum before the next call."""
    num_tokens = len(residual.sum_TD)
    if (exchange := tp.exchange_for(num_tokens * width * torch.bfloat16.itemsize)) is None:
        residual.add_(tp.sum_of(num_tokens, width, compute)[None])
    else:
        assert residual.parts_STD is None
        exchange.add_sum_(residual.sum_TD, compute(None)[None] if parts_STD is None else parts_STD)


class RowParallelLinear(nn.Module):
    """Each rank has some input columns; the sum of the ranks' outputs is added to the residual."""

    def __init__(self, in_features: int, out_features: int, format: MatrixFormat, setup: Setup) -> None:
        super().__init__()
        self.tp = setup.tp
        self.weight = Matrix.empty(out_features, self.tp.share(in_features, "in_features"), format, setup.place)

    def add_(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if self.tp.size == 1:
            self.weight.add_to(residual, x_TX, rows)
        else:
            add_sum_(residual, self.tp, self.weight.shape[0], lambda out_TD: self.weight.product(x_TX, rows, out_TD))

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        rows, columns = self.weight.shape
        yield from self.weight.tensors(prefix, (rows, columns * self.tp.size), slice(0, rows), self.tp.own(columns), slice(0, rows))


class VocabParallelEmbedding(nn.Module):
    """Each rank has a range of token ids. It is also the output head's matrix, which a tied model shares with the input."""

    def __init__(self, vocab_size: int, hidden_size: int, setup: Setup) -> None:
        super().__init__()
        self.tp, self._backend = setup.tp, setup.place.backend
        self.weight = setup.parameter(self.tp.share(vocab_size, "vocab_size"), hidden_size)

    @cached_property
    def output(self) -> Products[Any]:
        """Return the products of the output head; read once the weight is final."""
        return self.rounded("plain")

    def rounded(self, format: Format) -> Products[Any]:
        return products_of(format, self._backend)(storage_of(format).quantized(self.weight.data), 1)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Map ids (T,) of the whole vocabulary to (T, D)."""
        if self.tp.size == 1:
            return F.embedding(ids_T, self.weight)
        rows = self.weight.shape[0]
        local_T = ids_T - self.tp.rank * rows
        elsewhere_T = (local_T < 0) | (local_T >= rows)
        hidden_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.tp.all_reduce_(hidden_TD.masked_fill_(elsewhere_T[:, None], 0))

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        rows, columns = self.weight.shape
        yield CheckpointTensor(f"{prefix}.weight", (rows * self.tp.size, columns), (self.tp.own(rows),), self.weight.data)
