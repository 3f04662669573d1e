"""The residual stream of a step, what products take from it, and how many tokens they take."""

from dataclasses import dataclass
from enum import IntEnum

import torch


class RowClass(IntEnum):
    """How many tokens a step's products multiply at most: the class decides which kernel computes them. The runner chooses it once per
    step, a CUDA graph at its capture. Bounds were measured on an H200."""

    SINGLE = 1  # a product with a vector
    FEW = 64  # up to here our float8 product is faster than cuBLAS's, or at least that of gate and up
    SOME = 128  # up to here a float8 product that joins the residual is cut along the inner dimension
    SEVERAL = 304  # the same for bfloat16: with more, cuBLAS fills the device with a whole one, too
    MANY = 1 << 30

    @classmethod
    def of(cls, num_tokens: int) -> "RowClass":
        """The class of so many tokens."""
        return next(each for each in cls if num_tokens <= each)


@dataclass(frozen=True, slots=True)
class Normed:
    """RMSNorm of x = stream + the sum of the parts over S: x / sqrt(mean(x ** 2) + eps) * weight. The product that reads it computes the
    norm, and writes x into the stream if there are parts."""

    stream_TD: torch.Tensor
    parts_STD: torch.Tensor | None
    weight_D: torch.Tensor
    eps: float

    def settled(self) -> "Normed":
        """The same for a further product, once the first one has written the stream."""
        return self if self.parts_STD is None else Normed(self.stream_TD, None, self.weight_D, self.eps)


@dataclass(slots=True)
class Residual:
    """The residual stream of a step, (T, D), and what the next norm adds to it: the sum of `parts_STD` over S."""

    sum_TD: torch.Tensor
    parts_STD: torch.Tensor | None = None

    def add_(self, parts_STD: torch.Tensor) -> None:
        """residual += the sum over S. A norm comes before the next."""
        assert self.parts_STD is None, "the parts of the product before were not added"
        self.parts_STD = parts_STD

    def settle(self) -> torch.Tensor | None:
        """Hand the parts over: the caller adds them to `sum_TD`."""
        parts_STD, self.parts_STD = self.parts_STD, None
        return parts_STD

    def normed(self, weight_D: torch.Tensor, eps: float) -> Normed:
        """The norm, whose reader settles the stream: one product must read it before the stream changes."""
        return Normed(self.sum_TD, self.settle(), weight_D, eps)

    def keep_(self, tokens_S: torch.Tensor) -> None:
        """Drops all other tokens."""
        assert self.parts_STD is None
        self.sum_TD = self.sum_TD[tokens_S]


class Rounded:
    """Values (T, X) as the products of one format take them, for the next matrix of the same format."""

    __slots__ = ()


Activation = torch.Tensor | Normed | Rounded  # (T, X)
