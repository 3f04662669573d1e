"""Matrix whose products include the adapters of a step's tokens."""

import torch

from models.kernels.ops import Ops
from models.kernels.stream import Activation, Normed, Residual, Rounded, RowClass
from models.lora.low_rank import LowRank, LowRankOps, TokenSlots
from models.weights.matrix import Matrix


class StepSlots:
    """Slots of the tokens of the current forward pass."""

    def __init__(self) -> None:
        self._by_length: dict[int, TokenSlots] = {}

    def begin(self, slots_T: torch.Tensor | None, wanted_S: torch.Tensor) -> None:
        """Use these slots (int32, -1: no adapter); None: no token has an adapter. The last layer may continue with the tokens `wanted_S`
        only, which are then fewer: the number of a product's inputs tells which tokens they are."""
        self._by_length = {} if slots_T is None else {len(tokens_X): TokenSlots(tokens_X) for tokens_X in (slots_T[wanted_S], slots_T)}

    def end(self) -> None:
        self._by_length = {}

    def of(self, num_tokens: int) -> TokenSlots:
        return self._by_length[num_tokens]

    def __bool__(self) -> bool:
        return bool(self._by_length)


class AdaptedMatrix(Matrix):
    """The same matrix with the low-rank matrices of all slots. Without adapters in a step, products are those of the base class."""

    def __init__(self, base: Matrix, low_rank: LowRank, slots: StepSlots, ops: Ops, low_rank_ops: LowRankOps) -> None:
        vars(self).update(vars(base))
        self.low_rank, self._slots, self._ops, self._low_rank_ops = low_rank, slots, ops, low_rank_ops

    def product(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        if not self._slots:
            return super().product(x_TX, rows, out_TN)
        x_TK, slots = self._values(x_TX), self._slots.of(_num_tokens(x_TX))
        shrunk_PTR = self._low_rank_ops.shrink(x_TK, self.low_rank, slots)
        out_TN = super().product(x_TK, rows, out_TN)
        self._low_rank_ops.expand_(out_TN, shrunk_PTR, self.low_rank, slots)
        return out_TN

    def swiglu(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        if not self._slots:
            return super().swiglu(x_TX, rows)
        x_TK, slots = self._values(x_TX), self._slots.of(_num_tokens(x_TX))
        shrunk_PTR = self._low_rank_ops.shrink(x_TK, self.low_rank, slots)
        return self._low_rank_ops.expand_swiglu(super().product(x_TK, rows), shrunk_PTR, self.low_rank, slots)

    def add_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if not self._slots:
            super().add_to(residual, x_TX, rows)
            return
        assert residual.parts_STD is None, "the parts of the product before were not added"
        x_TK, slots = self._values(x_TX), self._slots.of(_num_tokens(x_TX))
        shrunk_PTR = self._low_rank_ops.shrink(x_TK, self.low_rank, slots)
        super().add_to(residual, x_TK, rows)
        out_TN = residual.sum_TD if residual.parts_STD is None else residual.parts_STD[0]
        self._low_rank_ops.expand_(out_TN, shrunk_PTR, self.low_rank, slots)

    def _values(self, x_TX: Activation) -> torch.Tensor:
        """Return the inputs; those of a norm are computed once for both products."""
        if isinstance(x_TX, Normed):
            return self._ops.norm(x_TX)
        assert isinstance(x_TX, torch.Tensor)
        return x_TX


def _num_tokens(x_TX: Activation) -> int:
    assert not isinstance(x_TX, Rounded), "the adapted product before returns values"
    return len(x_TX.stream_TD if isinstance(x_TX, Normed) else x_TX)
