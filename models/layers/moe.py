"""SwiGLU, mixtures of SwiGLU experts, and the layouts of their matrices in checkpoints."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import nn

from models.checkpoint.names import CheckpointPart, CheckpointTensor, Index, OneOf
from models.config.formats import MatrixFormat
from models.config.types import MoeConfig
from models.kernels.ops import Experts
from models.kernels.stream import Normed, Residual, RowClass
from models.layers.linear import FusedColumnParallelLinear, RowParallelLinear, Setup, add_sum_, even_part
from models.weights.matrix import Matrix, Stored, storage_of

ALL = slice(None)
ALIGNED = 16  # rows of a matrix that has a kernel for few tokens


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden_size: int, inner: int, format: MatrixFormat, setup: Setup) -> None:
        super().__init__()
        parts = [even_part(name, inner, setup.tp) for name in ("gate_proj", "up_proj")]
        self.gate_up_proj = FusedColumnParallelLinear(hidden_size, parts, format, setup)
        self.down_proj = RowParallelLinear(inner, hidden_size, format, setup)

    def add_(self, residual: Residual, x_TD: Normed, rows: RowClass, valid_T: torch.Tensor | None) -> None:
        self.down_proj.add_(residual, self.gate_up_proj.weight.swiglu(x_TD, rows), rows)


class StackedExperts(nn.Module):
    """This rank's part of all experts' matrices, see `Experts`: whole experts (`--ep`; the shared one on the last rank) or a share of each.
    ValueError if they do not divide."""

    def __init__(self, hidden_size: int, moe: MoeConfig, format: MatrixFormat, setup: Setup) -> None:
        super().__init__()
        tp, self.hidden_size, self.moe, self.inner = setup.tp, hidden_size, moe, moe.intermediate_size
        self.first, self.count, width, self._share = 0, moe.num_experts + moe.has_shared, self.inner, slice(0, self.inner)
        if tp.whole_experts:
            share = tp.share(moe.num_experts, "num_experts")
            self.first = tp.rank * share
            self.count = share + (moe.has_shared and tp.rank == tp.size - 1)
        else:
            width = tp.share(self.inner, "moe_intermediate_size")
            self._share = tp.own(width)
        for each in format:
            storage_of(each).check(hidden_size, (width,))
        self.gate_up = Matrix.empty(self.count * 2 * width, hidden_size, format, setup.place, self.count)
        self.down = Matrix.empty(self.count * hidden_size, width, format, setup.place, self.count)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointPart]:
        """Accept the layouts of transformers 5 (experts, outputs, inputs), of published files (experts, inputs, outputs), and of one
        tensor per expert. The shared expert's tensors are siblings of this module."""
        shared = {prefix.rpartition(".")[0] + ".shared_expert": self.moe.num_experts} if self.moe.has_shared else {}
        single = {f"{prefix}.{expert}": expert for expert in range(self.moe.num_experts)}
        matrices: Iterator[tuple[Stored, Stored]] = zip(self.gate_up.storage.stored, self.down.storage.stored, strict=True)
        parts = list(matrices)
        stacked = (
            tuple(slot for part, is_transposed in zip(parts, layout, strict=True) for slot in self._stacked(prefix, *part, is_transposed))
            for layout in product((False, True), repeat=len(parts))
        )
        yield OneOf((*stacked, tuple(slot for part in parts for slot in self._single(single, *part))))
        for part in parts:
            yield from self._single(shared, *part)

    def _stacked(self, prefix: str, gate_up: Stored, down: Stored, is_input_major: bool) -> Iterator[CheckpointTensor]:
        """Return all matrices of the experts, except the shared one, as one tensor of values or of per-block scales."""
        every, last = slice(0, self.hidden_size), min(self.first + self.count, self.moe.num_experts)
        experts, ours = slice(self.first, last), slice(0, last - self.first)
        (inner, hidden), (share, _) = gate_up.in_blocks((self.inner, self.hidden_size), self._share, every)

        def tensor(name: str, shape: tuple[int, int], index: Index, target: torch.Tensor) -> CheckpointTensor:
            if is_input_major:
                shape, index, target = shape[::-1], index[::-1], target.transpose(1, 2)
            name = f"{prefix}.{name}_proj{gate_up.suffix.removeprefix('.weight')}"
            return CheckpointTensor(name, (self.moe.num_experts, *shape), (experts, *index), target[ours])

        for half, target in enumerate(gate_up.tensor.unflatten(0, (self.count, 2, -1)).unbind(1)):
            rows = slice(half * inner + share.start, half * inner + share.stop)
            yield tensor("gate_up", (2 * inner, hidden), (rows, ALL), target)
        of_down = down.in_blocks((self.hidden_size, self.inner), every, self._share)
        yield tensor("down", *of_down, down.tensor.unflatten(0, (self.count, -1)))

    def _single(self, experts: dict[str, int], gate_up: Stored, down: Stored) -> Iterator[CheckpointTensor]:
        """Return the three matrices of each of `experts` (path -> number); those of other ranks are not read."""
        halves, downs = gate_up.tensor.unflatten(0, (self.count, 2, -1)), down.tensor.unflatten(0, (self.count, -1))
        every, of_up, of_down = slice(0, self.hidden_size), (self.inner, self.hidden_size), (self.hidden_size, self.inner)
        for path, expert in experts.items():
            i = expert - self.first
            targets = (*halves[i], downs[i]) if 0 <= i < self.count else (down.tensor[:0],) * 3
            yield gate_up.part(f"{path}.gate_proj", of_up, self._share, every, targets[0])
            yield gate_up.part(f"{path}.up_proj", of_up, self._share, every, targets[1])
            yield down.part(f"{path}.down_proj", of_down, every, self._share, targets[2])


class Router(nn.Module):
    """One row per expert, followed by one for the shared expert's weight and by padding that aligns the products' rows."""

    def __init__(self, hidden_size: int, moe: MoeConfig, setup: Setup) -> None:
        super().__init__()
        self._num_experts = moe.num_experts
        self.weight = setup.parameter(moe.num_experts + ALIGNED * moe.has_shared, hidden_size)

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointTensor]:
        weight_ED, count = self.weight.data, self._num_experts
        yield CheckpointTensor(f"{prefix}.weight", (count, weight_ED.shape[1]), (ALL,), weight_ED[:count])
        if len(weight_ED) > count:
            name = prefix.rpartition(".")[0] + ".shared_expert_gate.weight"
            yield CheckpointTensor(name, (1, weight_ED.shape[1]), (ALL,), weight_ED[count : count + 1])


class SparseMoe(nn.Module):
    """Sum of the experts that the router chooses per token, with weights that sum to one, and of the gated shared expert."""

    def __init__(self, hidden_size: int, moe: MoeConfig, format: MatrixFormat, setup: Setup) -> None:
        super().__init__()
        self.ops, self.tp = setup.ops, setup.tp
        self.gate = Router(hidden_size, moe, setup)
        self.experts = mine = StackedExperts(hidden_size, moe, format, setup)
        chosen = moe.num_experts, moe.num_experts_per_tok, moe.has_shared
        self._experts = Experts(self.gate.weight, mine.gate_up, mine.down, mine.first, mine.count, *chosen)

    def add_(self, residual: Residual, x_TD: Normed, rows: RowClass, valid_T: torch.Tensor | None) -> None:
        if self.tp.size == 1:
            self.ops.add_experts_(residual, x_TD, self._experts, rows, valid_T)
        else:
            parts_STD = self.ops.sparse_swiglu(x_TD, self._experts, rows, valid_T)
            add_sum_(residual, self.tp, self.experts.hidden_size, lambda out_TD: torch.sum(parts_STD, 0, out=out_TD), parts_STD)
