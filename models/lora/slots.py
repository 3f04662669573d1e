"""Slots on the device for adapters of a model: fixed addresses and a padded rank, so that graphs stay valid."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from safetensors import safe_open
from torch import nn

from models.config.registry import imported
from models.decoders.contract import LanguageModel
from models.kernels.backend import Backend
from models.layers.linear import FusedColumnParallelLinear, Linear, Part, RowParallelLinear, placed
from models.lora.adapter import OF_A, OF_B, WEIGHTS, Adapter
from models.lora.low_rank import OPS, LowRank, LowRankOps, make_low_rank
from models.lora.matrix import AdaptedProducts, StepSlots
from models.lora.targets import RANK_STEP, TOWER
from models.lora.tower import TowerSlot, adapt_linear, rows_of

DECODER = "language_model.layers."  # of modules that are adapted, besides the tower's
Factors = tuple[torch.Tensor, torch.Tensor]  # A (r, inputs), and B (outputs, r) times the scale
Weights = dict[str, Factors]  # by module
Write = Callable[[int, Factors | None], None]  # slot, and its new factors; None: zeros


class AdapterSlots:
    """Slots of a loaded model, whose matrices it replaces by adapted ones. Call it after `finish` and before anything is captured."""

    def __init__(self, model: LanguageModel, backend: Backend, num_slots: int, max_rank: int) -> None:
        self._tower_slot = TowerSlot()
        self._model, self._backend, self._num_slots = model, backend, num_slots
        self._rank = -(-max_rank // RANK_STEP) * RANK_STEP
        self._ops: LowRankOps = imported(OPS[backend.name])()
        self._steps = StepSlots()
        self._writers: dict[str, Write] = {}
        for path, module in list(model.named_modules()):
            if path.startswith(DECODER) and isinstance(module, FusedColumnParallelLinear | RowParallelLinear):
                self._adapt(f"model.{path}", module)
            elif f"model.{path}".startswith(TOWER) and isinstance(module, Linear):
                self._adapt_tower(f"model.{path}", module)
        assert isinstance(model, nn.Module)
        model.register_forward_pre_hook(lambda _, arguments: self._steps.begin(arguments[0].adapters_T, arguments[0].logits_indices))
        model.register_forward_hook(lambda *_: self._steps.end(), always_call=True)

    def load(self, slot: int, weights: Weights) -> None:
        """Write an adapter to a slot, in stream order."""
        for module, write in self._writers.items():
            write(slot, weights.get(module))

    @contextmanager
    def tower(self, slot: int) -> Iterator[None]:
        """Add the adapter of this slot to the tower's layers; -1: none."""
        assert self._model.tower is not None
        self._tower_slot.current, self._model.tower.uses_graphs = slot, slot < 0
        try:
            yield
        finally:
            self._tower_slot.current, self._model.tower.uses_graphs = -1, True

    def _adapt(self, path: str, module: FusedColumnParallelLinear | RowParallelLinear) -> None:
        (parent, _, own_name), (rows, width) = path.rpartition("."), module.weight.shape
        if isinstance(module, FusedColumnParallelLinear):
            parts, columns = module.parts, slice(None)
        else:
            parts, columns = [Part(own_name, rows, 0, rows)], module.tp.own(width)
        names = list(dict.fromkeys(part.name for part in parts))
        ranges = tuple((own.start, own.stop, names.index(part.name)) for part, own in placed(parts))
        low_rank = make_low_rank(self._num_slots, self._rank, width, ranges, self._model.device, self._model.dtype)
        module.weight.bind(AdaptedProducts(module.weight.products, low_rank, self._steps, self._backend.ops, self._ops))
        for group, name in enumerate(names):
            found = [(own, slice(part.start, part.start + part.rows)) for part, own in placed(parts) if part.name == name]
            self._writers[f"{parent}.{name}"] = _writer(low_rank, group, found, columns)

    def _adapt_tower(self, path: str, layer: Linear) -> None:
        rows = rows_of(layer, path)
        adapted = adapt_linear(layer, self._num_slots, self._rank, self._tower_slot)

        def write(slot: int, factors: Factors | None) -> None:
            if factors is None:
                adapted.a_SRK[slot].zero_()
                adapted.b_SNR[slot].zero_()
            else:
                _write(adapted.a_SRK[slot], adapted.b_SNR[slot], rows, factors)

        self._writers[path] = write


def _writer(low_rank: LowRank, group: int, parts: list[tuple[slice, slice]], columns: slice) -> Write:
    """Return the writer of a module: these columns of A, and rows of the product with the rows of B that they are."""

    def write(slot: int, factors: Factors | None) -> None:
        low_rank.ranks_SG[slot, group].zero_()  # assigning a number would wait for the device
        if factors is not None:
            padded, factors = -(-len(factors[0]) // RANK_STEP) * RANK_STEP, (factors[0][:, columns], factors[1])
            _write(low_rank.a_SGRK[slot, group, :padded], low_rank.b_SNR[slot, :, :padded], parts, factors)
            low_rank.ranks_SG[slot, group].fill_(padded)

    return write


def _write(a_RK: torch.Tensor, b_NR: torch.Tensor, parts: list[tuple[slice, slice]], factors: Factors) -> None:
    """Copy factors, padded with zeros to the rank of the targets."""
    rank = len(factors[0])
    a_RK[rank:] = 0
    a_RK[:rank].copy_(factors[0], non_blocking=True)
    for own, stored in parts:
        b_NR[own, rank:] = 0
        b_NR[own, :rank].copy_(factors[1][stored], non_blocking=True)


def read_weights(adapter: Adapter, dtype: torch.dtype, is_pinned: bool = False) -> Weights:
    """Read an adapter to host memory; scales are applied to B in float32. ValueError or OSError."""
    weights: Weights = {}
    with safe_open(adapter.folder / WEIGHTS, framework="pt") as file:
        for target in adapter.targets:
            a, b = file.get_tensor(target.prefix + OF_A), file.get_tensor(target.prefix + OF_B).float() * target.scale
            factors = a.to(dtype, copy=True), b.to(dtype)  # a view of the file would be read when it is used
            weights[target.module] = (factors[0].pin_memory(), factors[1].pin_memory()) if is_pinned else factors
    return weights
