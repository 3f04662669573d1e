"""Products that include the adapters of a step's tokens."""

from typing import Any

import torch

from models.kernels.ops import Ops
from models.kernels.stream import Activation, Normed, Residual, Rounded, RowClass
from models.lora.low_rank import LowRank, LowRankOps, TokenSlots
from models.weights.matrix import Products


class StepSlots:
    """Slots of the tokens of the current forward pass."""

    def __init__(self) -> None:
        self._by_length: dict[int, TokenSlots] = {}

    def begin(self, slots_T: torch.Tensor | None, wanted_S: torch.Tensor) -> None:
        """Use these slots (int32, -1: no adapter); None: no token has one. The last layer may continue with the tokens `wanted_S` only: the
        number of a product's inputs tells which tokens they are."""
        self._by_length = {} if slots_T is None else {len(tokens_X): TokenSlots(tokens_X) for tokens_X in (slots_T[wanted_S], slots_T)}

    def end(self) -> None:
        self._by_length = {}

    def of(self, num_tokens: int) -> TokenSlots:
        return self._by_length[num_tokens]

    def __bool__(self) -> bool:
        return bool(self._by_length)


class AdaptedProducts(Products[Any]):
    """Products with the low-rank matrices of all slots; without adapters in a step, those of `base`."""

    def __init__(self, base: Products[Any], low_rank: LowRank, slots: StepSlots, ops: Ops, low_rank_ops: LowRankOps) -> None:
        super().__init__(base.matrix, base.count)
        self._base, self._low_rank, self._slots, self._ops, self._low_rank_ops = base, low_rank, slots, ops, low_rank_ops

    def product(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        if not self._slots:
            return self._base.product(x_TX, rows, out_TN)
        x_TK, slots, shrunk_PTR = self._shrunk(x_TX)
        out_TN = self._base.product(x_TK, rows, out_TN)
        self._low_rank_ops.expand_(out_TN, shrunk_PTR, self._low_rank, slots)
        return out_TN

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        return self._base.product_f32(x_TX, rows, out_TN)

    def swiglu(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        if not self._slots:
            return self._base.swiglu(x_TX, rows)
        x_TK, slots, shrunk_PTR = self._shrunk(x_TX)
        return self._low_rank_ops.expand_swiglu(self._base.product(x_TK, rows), shrunk_PTR, self._low_rank, slots)

    def add_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if not self._slots:
            self._base.add_to(residual, x_TX, rows)
            return
        x_TK, slots, shrunk_PTR = self._shrunk(x_TX)
        self._base.add_to(residual, x_TK, rows)
        out_TN = residual.sum_TD if residual.parts_STD is None else residual.parts_STD[0]
        self._low_rank_ops.expand_(out_TN, shrunk_PTR, self._low_rank, slots)

    def _shrunk(self, x_TX: Activation) -> tuple[torch.Tensor, TokenSlots, torch.Tensor]:
        """Return the inputs, computed once for both products, the tokens' slots, and A @ the inputs."""
        x_TK = self._ops.norm(x_TX) if isinstance(x_TX, Normed) else x_TX
        assert isinstance(x_TK, torch.Tensor), "the adapted product before returns values"
        slots = self._slots.of(len(x_TK))
        return x_TK, slots, self._low_rank_ops.shrink(x_TK, self._low_rank, slots)
