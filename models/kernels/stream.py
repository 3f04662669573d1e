"""Residual stream of a step, and the inputs of products that read it."""

from dataclasses import dataclass, field
from enum import IntEnum

import torch

ROOM_ROWS = 4  # a single part is allocated in multiples of it, for products of float8


class RowClass(IntEnum):
    """Class of a step's number of tokens, which selects the kernels of products. The runner chooses it once per step, a CUDA graph at its
    capture. Bounds were measured on an H200."""

    SINGLE = 1  # matrix-vector product
    FEW = 64  # up to here our product is faster than cuBLAS's
    SOME = 128  # up to here a float8 product added to the residual uses split-K
    SEVERAL = 304  # the same for bfloat16: with more tokens cuBLAS fills the device without split-K
    MANY = 1 << 30

    @classmethod
    def of(cls, num_tokens: int) -> "RowClass":
        """Return the class of a number of tokens."""
        return next(each for each in cls if num_tokens <= each)


@dataclass(frozen=True, slots=True)
class Normed:
    """RMSNorm of x = stream + the sum of the parts over S: x / sqrt(mean(x ** 2) + eps) * weight. The product that reads it computes the
    norm and writes x to the stream if there are parts."""

    stream_TD: torch.Tensor
    parts_STD: torch.Tensor | None
    weight_D: torch.Tensor
    eps: float

    def settled(self) -> "Normed":
        """Return the same norm for further products, after the first one has written the stream."""
        return self if self.parts_STD is None else Normed(self.stream_TD, None, self.weight_D, self.eps)


@dataclass(slots=True)
class Residual:
    """Residual stream of a step, (T, D), and the split-K partial sums `parts_STD` that the next norm adds to it."""

    sum_TD: torch.Tensor
    parts_STD: torch.Tensor | None = None
    _rooms: dict[tuple[tuple[int, int, int], torch.dtype], torch.Tensor] = field(default_factory=dict)

    def room(self, count: int, num_tokens: int, width: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return memory for the next parts, the same for equal shapes: the norm has read the last ones, and equal layers write the same."""
        rows = num_tokens if count > 1 else -(-num_tokens // ROOM_ROWS) * ROOM_ROWS
        key = shape, dtype = (count, rows, width), dtype or self.sum_TD.dtype
        if key not in self._rooms:
            self._rooms[key] = self.sum_TD.new_empty(shape, dtype=dtype)
        return self._rooms[key][:, :num_tokens]

    def add_(self, parts_STD: torch.Tensor) -> None:
        """residual += the sum over S. A norm must follow before the next call."""
        assert self.parts_STD is None, "the partial sums of the previous product were not added"
        self.parts_STD = parts_STD

    def settle(self) -> torch.Tensor | None:
        """Return the parts; the caller adds them to `sum_TD`."""
        parts_STD, self.parts_STD = self.parts_STD, None
        return parts_STD

    def normed(self, weight_D: torch.Tensor, eps: float) -> Normed:
        """Return the norm. The product that reads it must run before the stream changes."""
        return Normed(self.sum_TD, self.settle(), weight_D, eps)

    def keep_(self, tokens_S: torch.Tensor) -> None:
        """Keep only these tokens."""
        assert self.parts_STD is None
        self.sum_TD = self.sum_TD[tokens_S]


class Rounded:
    """Values (T, X) in the input format of the next matrix."""

    __slots__ = ()


Activation = torch.Tensor | Normed | Rounded  # (T, X)
