"""A mixture of SwiGLU experts in place of one, and how its matrices lie in checkpoints."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from models.backends.ops import Experts, Normed, Ops, Residual
from models.config import TextConfig
from models.layers.checkpoint import CheckpointTensor, Index, OneOf
from models.layers.fp8 import BLOCK, BlockScaled, Weight, unfit
from models.layers.linear import add_sum_, empty_parameter, empty_weight, quantize_
from models.parallel import TensorParallel

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Share:
    """Which experts a rank has, and which of the values between an expert's two products."""

    experts: slice
    inner: slice

    @classmethod
    def of(cls, num_experts: int, inner: int, tp: TensorParallel) -> "Share":
        """Some experts whole if the ranks have whole ones, else a share of each. ValueError if they do not divide."""
        if tp.whole_experts:
            count = tp.share(num_experts, "num_experts")
            return cls(slice(tp.rank * count, (tp.rank + 1) * count), slice(0, inner))
        width = tp.share(inner, "moe_intermediate_size")
        return cls(slice(0, num_experts), slice(tp.rank * width, (tp.rank + 1) * width))


class Router(nn.Module):
    """The matrix (E, D) whose products with a token say which experts it goes to; whole on every rank."""

    def __init__(self, num_experts: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.weight = empty_parameter(num_experts, hidden_size, dtype=dtype, device=device)


class StackedExperts(nn.Module):
    """This rank's part of all experts' matrices, see `Experts`."""

    gate_up: Weight
    down: Weight

    def __init__(
        self, hidden_size: int, num_experts: int, inner: int, tp: TensorParallel, dtype: torch.dtype | None, device: torch.device
    ) -> None:
        super().__init__()
        self.share = Share.of(num_experts, inner, tp)
        self.hidden_size, self.num_experts, self.inner = hidden_size, num_experts, inner
        self.count = self.share.experts.stop - self.share.experts.start
        width = self.share.inner.stop - self.share.inner.start
        if dtype is None and (width % BLOCK or hidden_size % BLOCK):
            raise unfit(hidden_size, width)
        self.gate_up = empty_weight(self.count * 2 * width, hidden_size, dtype, device)
        self.down = empty_weight(self.count * hidden_size, width, dtype, device)

    def checkpoint_tensors(self, prefix: str) -> Iterator[OneOf]:
        """As transformers 5 writes them (experts, outputs, inputs), as published (experts, inputs, outputs), or each expert's alone."""
        if isinstance(self.gate_up, torch.Tensor) and isinstance(self.down, torch.Tensor):
            targets = self.gate_up.data, self.down.data
            yield OneOf((*(tuple(self._stacked(prefix, "", 1, *targets, turned)) for turned in (False, True)),
                         tuple(self._single(prefix, "", 1, *targets))))  # fmt: skip
            return
        assert isinstance(self.gate_up, BlockScaled) and isinstance(self.down, BlockScaled)
        values, scales = (self.gate_up.values, self.down.values), (self.gate_up.scales, self.down.scales)
        stacked = (
            (*self._stacked(prefix, "", 1, *values, turned), *self._stacked(prefix, "_scale_inv", BLOCK, *scales, scales_turned))
            for turned, scales_turned in product((False, True), repeat=2)
        )
        single = *self._single(prefix, "", 1, *values), *self._single(prefix, "_scale_inv", BLOCK, *scales)
        yield OneOf((*stacked, single))

    def _stacked(
        self, prefix: str, suffix: str, block: int, gate_up: torch.Tensor, down: torch.Tensor, is_input_major: bool
    ) -> Iterator[CheckpointTensor]:
        """All experts' matrices as one tensor; of values, or of what each block of `block` squared has one of."""
        hidden, inner = self.hidden_size // block, self.inner // block
        share = slice(self.share.inner.start // block, self.share.inner.stop // block)

        def tensor(name: str, shape: tuple[int, int], index: Index, target: torch.Tensor) -> CheckpointTensor:
            if is_input_major:
                shape, index, target = shape[::-1], index[::-1], target.transpose(1, 2)
            name = f"{prefix}.{name}_proj{suffix}"
            return CheckpointTensor(name, (self.num_experts, *shape), (self.share.experts, *index), target)

        for half, target in enumerate(gate_up.unflatten(0, (self.count, 2, -1)).unbind(1)):
            rows = slice(half * inner + share.start, half * inner + share.stop)
            yield tensor("gate_up", (2 * inner, hidden), (rows, ALL), target)
        yield tensor("down", (hidden, inner), (ALL, share), down.unflatten(0, (self.count, -1)))

    def _single(self, prefix: str, suffix: str, block: int, gate_up: torch.Tensor, down: torch.Tensor) -> Iterator[CheckpointTensor]:
        """Each expert's three matrices; of other ranks' experts nothing is read."""
        hidden, inner = self.hidden_size // block, self.inner // block
        share = slice(self.share.inner.start // block, self.share.inner.stop // block)
        halves, downs = gate_up.unflatten(0, (self.count, 2, -1)), down.unflatten(0, (self.count, -1))
        for expert in range(self.num_experts):
            i = expert - self.share.experts.start
            targets = (*halves[i], downs[i]) if 0 <= i < self.count else (down[:0],) * 3
            for name, target in zip(("gate", "up", "down"), targets, strict=True):
                shape, index = ((hidden, inner), (ALL, share)) if name == "down" else ((inner, hidden), (share, ALL))
                yield CheckpointTensor(f"{prefix}.{expert}.{name}_proj.weight{suffix}", shape, index, target)


class SparseMoe(nn.Module):
    """The sum of the experts that the router chooses for a token, by weights that sum to one.

    Ranks have a share of every expert (`--tp`) or some experts whole (`--ep`). Every rank has all tokens, so one sum over the ranks
    combines what each computes: an exchange of tokens pays where each rank has tokens of its own.
    """

    def __init__(self, config: TextConfig, tp: TensorParallel, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        assert config.moe is not None
        self.ops = ops
        self.tp = tp
        self.num_chosen = config.moe.num_experts_per_tok
        self.gate = Router(config.moe.num_experts, config.hidden_size, dtype, device)
        stored = None if config.is_fp8 else dtype
        self.experts = StackedExperts(config.hidden_size, config.moe.num_experts, config.moe.intermediate_size, tp, stored, device)

    def add_(self, residual: Residual, x_TD: Normed, real_T: torch.Tensor | None) -> None:
        """residual += the output."""
        mine = self.experts
        experts = Experts(self.gate.weight, mine.gate_up, mine.down, mine.share.experts.start, mine.count, self.num_chosen)
        if self.tp.size == 1:
            self.ops.add_experts_(residual, x_TD, experts, real_T)
        else:
            parts_STD = self.ops.sparse_swiglu(x_TD, experts, real_T)
            add_sum_(residual, self.tp, mine.hidden_size, lambda out_TD: torch.sum(parts_STD, 0, out=out_TD), parts_STD)

    def quantize_(self) -> None:
        """Makes the experts' matrices float8; the router's stays as it is."""
        quantize_(self.experts, "gate_up")
        quantize_(self.experts, "down")
