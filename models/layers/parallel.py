"""Tensor parallelism: the group of ranks as an explicit object, and the linear layers and embeddings that are cut over it.

Every rank runs the same code on its share; activations between layers are whole on every rank. Called by the decoder and the loader.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from models.backends.ops import Ops
from models.layers.checkpoint import CheckpointTensor
from models.layers.fp8 import BLOCK, BlockScaled, Input, Weight, unfit


class SmallSums(Protocol):
    """Sums of few tokens over the ranks that are faster than those of the group."""

    def room(self, num_tokens: int, width: int) -> torch.Tensor | None:
        """Where this rank leaves what is to be summed, (T, D), until the sum is read; None if it is too much."""

    def sum_(self, x_TD: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place: of all of what `room` returned last."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Rank `rank` of `size`. With one rank every collective is the identity and `group` is None."""

    rank: int
    size: int
    group: dist.ProcessGroup | None
    small_sums: SmallSums | None = None

    @classmethod
    def single(cls) -> "TensorParallel":
        """The whole model on one device."""
        return cls(rank=0, size=1, group=None)

    def share(self, total: int, what: str) -> int:
        """`total / size`; ValueError that names `what` if it does not divide."""
        if total % self.size:
            raise ValueError(f"{what} ({total}) does not divide over {self.size} tensor-parallel ranks")
        return total // self.size

    def all_reduce_(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def sum_of_linear(self, ops: Ops, x_TX: Input, weight_DX: Weight) -> torch.Tensor:
        """The sum over the ranks of x @ weight.T, to be read before the next call."""
        room_TD = None if self.small_sums is None else self.small_sums.room(len(x_TX), len(weight_DX))
        if self.small_sums is None or room_TD is None:
            return self.all_reduce_(ops.linear(x_TX, weight_DX))
        return self.small_sums.sum_(ops.linear(x_TX, weight_DX, room_TD))

    def broadcast_(self, x: torch.Tensor) -> torch.Tensor:
        """The value of rank 0, in place."""
        if self.size > 1:
            dist.broadcast(x, group=self.group, group_src=0)
        return x

    def all_gather_columns(self, x: torch.Tensor) -> torch.Tensor:
        """(S, n) of each rank -> (S, size * n), in rank order."""
        if self.size == 1:
            return x
        gathered = x.new_empty((self.size * x.shape[0], x.shape[1]))
        dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group)
        return gathered.view(self.size, *x.shape).transpose(0, 1).flatten(1)

    def all_gather_rows(self, x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """(counts[rank], ...) of each rank -> (sum(counts), ...) in rank order. Counts may differ, and every rank knows all of them."""
        if self.size == 1:
            return x
        longest = max(counts)
        padded = x.new_zeros((longest, *x.shape[1:]))
        padded[: x.shape[0]] = x
        gathered = x.new_empty((self.size * longest, *x.shape[1:]))
        dist.all_gather_into_tensor(gathered, padded, group=self.group)
        return torch.cat([gathered[rank * longest : rank * longest + count] for rank, count in enumerate(counts)])


@dataclass(frozen=True, slots=True)
class Part:
    """Rows `start : start + rows` of the checkpoint's matrix `name`, which has `total_rows` rows."""

    name: str
    total_rows: int
    start: int
    rows: int


def even_part(name: str, total_rows: int, tp: TensorParallel) -> Part:
    """This rank's share of a matrix that divides over the ranks."""
    rows = tp.share(total_rows, name)
    return Part(name, total_rows, tp.rank * rows, rows)


def kv_heads_of(num_kv_heads: int, tp: TensorParallel) -> tuple[int, int]:
    """(first KV head, number of KV heads) of this rank. With more ranks than heads a head is replicated on size / heads ranks."""
    if tp.size <= num_kv_heads:
        count = tp.share(num_kv_heads, "num_key_value_heads")
        return tp.rank * count, count
    if tp.size % num_kv_heads:
        raise ValueError(f"{tp.size} tensor-parallel ranks are not a multiple of num_key_value_heads ({num_kv_heads})")
    return tp.rank * num_kv_heads // tp.size, 1


def empty_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter without gradient; the loader or the dummy initialiser fills it."""
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """A whole linear layer with bias, the same on every rank."""

    def __init__(self, in_features: int, out_features: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(out_features, in_features, dtype=dtype, device=device)
        self.bias = empty_parameter(out_features, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


def empty_weight(rows: int, columns: int, dtype: torch.dtype | None, device: torch.device) -> Weight:
    """An uninitialised matrix; `dtype` None is float8 in scaled blocks."""
    return BlockScaled.empty(rows, columns, device) if dtype is None else empty_parameter(rows, columns, dtype=dtype, device=device)


def quantize_(layer: "FusedColumnParallelLinear | RowParallelLinear") -> None:
    """The layer's matrix becomes float8 in scaled blocks."""
    matrix = layer.weight
    assert isinstance(matrix, nn.Parameter)
    del layer.weight  # a registered parameter does not give way to anything else
    layer.weight = BlockScaled.quantized(matrix)


def weight_tensors(name: str, weight: Weight, shape: tuple[int, int], rows: slice, columns: slice, target_rows: slice) -> Iterator[CheckpointTensor]:
    """Rows `target_rows` of `weight` are these rows and columns of the checkpoint's matrix of this shape, and of its scales."""
    if not isinstance(weight, BlockScaled):
        yield CheckpointTensor(f"{name}.weight", shape, (rows, columns), weight.data[target_rows])
        return
    yield CheckpointTensor(f"{name}.weight", shape, (rows, columns), weight.values[target_rows])
    num_blocks = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
    yield CheckpointTensor(f"{name}.weight_scale_inv", num_blocks, (_blocks(rows), _blocks(columns)), weight.scales[_blocks(target_rows)])


def _blocks(values: slice) -> slice:
    return slice(values.start // BLOCK, values.stop // BLOCK)


class FusedColumnParallelLinear(nn.Module):
    """Several matrices of the checkpoint with the same input as one matrix, their rows one after the other; its user multiplies."""

    def __init__(self, in_features: int, parts: Sequence[Part], dtype: torch.dtype | None, device: torch.device) -> None:
        super().__init__()
        self.parts = tuple(parts)
        if dtype is None and any(part.start % BLOCK or part.rows % BLOCK for part in parts):
            raise unfit(in_features, *(part.rows for part in parts))
        self.weight = empty_weight(sum(part.rows for part in parts), in_features, dtype, device)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        """The matrices are siblings of this layer in the checkpoint."""
        parent = prefix.rpartition(".")[0]
        row, width = 0, self.weight.shape[1]
        for part in self.parts:
            rows, target_rows = slice(part.start, part.start + part.rows), slice(row, row + part.rows)
            yield from weight_tensors(f"{parent}.{part.name}", self.weight, (part.total_rows, width), rows, slice(0, width), target_rows)
            row += part.rows


class RowParallelLinear(nn.Module):
    """Each rank holds some input columns; the outputs are summed over the ranks and join the residual: (T, in / size) -> (T, out)."""

    def __init__(
        self, in_features: int, out_features: int, tp: TensorParallel, ops: Ops, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        super().__init__()
        self.tp = tp
        self.ops = ops
        self.weight = empty_weight(out_features, tp.share(in_features, "in_features"), dtype, device)

    def add_(self, x_TX: Input, residual_TD: torch.Tensor) -> torch.Tensor | None:
        """residual += the layer's output, as `Ops.linear_add_`: what this returns is still to be added, by the next norm."""
        if self.tp.size == 1:
            return self.ops.linear_add_(x_TX, self.weight, residual_TD)
        return self.tp.sum_of_linear(self.ops, x_TX, self.weight)[None]

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        rows, columns = self.weight.shape
        share = slice(self.tp.rank * columns, (self.tp.rank + 1) * columns)
        yield from weight_tensors(prefix, self.weight, (rows, columns * self.tp.size), slice(0, rows), share, slice(0, rows))


class VocabParallelEmbedding(nn.Module):
    """Each rank holds a range of token ids. Also the output head's matrix (`logits`), which a tied model shares with the input."""

    def __init__(self, vocab_size: int, hidden_size: int, tp: TensorParallel, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.tp = tp
        self.weight = empty_parameter(tp.share(vocab_size, "vocab_size"), hidden_size, dtype=dtype, device=device)

    def forward(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Ids (T,) of the whole vocabulary -> (T, D)."""
        if self.tp.size == 1:
            return F.embedding(ids_T, self.weight)
        rows = self.weight.shape[0]
        local_T = ids_T - self.tp.rank * rows
        elsewhere_T = (local_T < 0) | (local_T >= rows)
        hidden_TD = F.embedding(local_T.masked_fill(elsewhere_T, 0), self.weight)
        return self.tp.all_reduce_(hidden_TD.masked_fill_(elsewhere_T[:, None], 0))

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        rows, columns = self.weight.shape
        index = (slice(self.tp.rank * rows, (self.tp.rank + 1) * rows),)
        yield CheckpointTensor(f"{prefix}.weight", (rows * self.tp.size, columns), index, self.weight.data)
