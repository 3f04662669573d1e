"""Equal layers launch equal kernels: one layer of a kind runs in Python, the others repeat its launches with their own addresses.

    layer 0 ── Python, captured ──▶ layers 1 to n ── the same launches, other weights and caches

For a new sequence of functions two layers are captured: an address is a word that differs between them by the distance of a tensor. A word
of two small numbers may look like an address, but is equal in both.

Layers are of one kind if all values and shapes of tensors that can be reached from them are equal. Their only common state is the residual,
whose parts have the same memory in each layer (`Residual.room`), and the step's own tensors. If the first layer leaves parts, later steps
of that class begin with empty ones, so that it equals the others.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from models.kernels.captured import Captured, Places, Unsupported, Words, can_capture, capture, moved
from models.kernels.compiling import THIS_THREAD
from models.kernels.stream import Residual, RowClass

logger = logging.getLogger(__name__)

ORDINALS = ("layer", "ordinal")  # attributes that number layers
LEAST = 2  # later layers of a kind that are worth a capture

OfStep = Callable[[int], Sequence[torch.Tensor]]
Run = Callable[[int, Residual, Callable[[], object]], object]


class Repeats:
    """Runner of layers whose weights stay where they are. The first step runs all in Python: what a layer computes once is there then."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._values: list[tuple[object, list[torch.Tensor]]] = []
        self._kinds: dict[object, list[Kind]] = {}
        self._is_warm = self._is_off = False
        self._left: dict[RowClass, tuple[int, torch.dtype]] = {}  # count and type of parts that the first layer leaves
        self._unequal: set[RowClass] = set()  # the first layer leaves other parts than it finds

    def start(self, residual: Residual, of_step: OfStep, is_possible: bool = True) -> Run:
        """Return a function that runs layer i by the given call. `of_step(i)`: tensors of the step that only layer i uses: its cache.
        `is_possible`: whether the layers only launch kernels."""
        is_warm, self._is_warm = self._is_warm, THIS_THREAD.compiler is None
        if not is_warm or not is_possible or not can_capture() or self._is_off:
            return lambda i, residual, call: call()
        if (rows := RowClass.of(len(residual.sum_TD))) in self._left and rows not in self._unequal:
            count, dtype = self._left[rows]
            num_tokens, width = residual.sum_TD.shape
            residual.add_(residual.room(count, num_tokens, width, dtype).zero_())
        key = tuple(tensor.data_ptr() for i in (0, len(self._layers) - 1) for tensor in of_step(i))
        if key not in self._kinds:
            self._kinds[key] = self._make_kinds(of_step)
        return partial(self._run, {i: kind for kind in self._kinds[key] for i in kind.layers}, {})

    def _make_kinds(self, of_step: OfStep) -> list["Kind"]:
        self._values = self._values or [inventory(layer) for layer in self._layers]
        kinds: dict[object, Kind] = {}
        for i, (values, tensors) in enumerate(self._values):
            own = of_step(i)
            kinds.setdefault((values, *map(shape_of, own)), Kind()).add(i, [*tensors, *own])
        return list(kinds.values())

    def _run(
        self, kinds: dict[int, "Kind"], recorded: dict["Kind", "Recorded"], i: int, residual: Residual, call: Callable[[], object]
    ) -> None:
        kind, parts, first = kinds[i], residual.parts_STD, RowClass.of(len(residual.sum_TD)) if i == 0 else None
        found = recorded.get(kind)
        is_equal = found is None or found.parts == place_of(parts)
        if found is not None and found.words is not None and is_equal:
            found.captured.run(found.words[kind.layers.index(i)])
        elif not is_equal or self._is_off or kind.layers[-LEAST:][0] <= i or first in self._unequal:
            call()
        else:
            try:
                captured = capture(call)
            except (Unsupported, RuntimeError) as problem:  # a full memory may be freed outside a capture
                if not isinstance(problem, torch.OutOfMemoryError):
                    logger.warning("launches of layers are not repeated: %s", problem)
                    self._is_off = True
                residual.parts_STD = parts
                call()
                return
            captured.run(captured.words)
            if place_of(residual.parts_STD) == place_of(parts):
                recorded[kind] = Recorded(i, captured, kind.words_of(i, captured, found), place_of(parts))
            elif first is not None:
                if parts is None and residual.parts_STD is not None:
                    self._left[first] = len(residual.parts_STD), residual.parts_STD.dtype
                else:
                    self._unequal.add(first)


class Recorded(NamedTuple):
    layer: int
    captured: Captured
    words: Words | None  # of each layer of the kind, once it is known which are addresses
    parts: object  # place of the residual's parts before and after the layer


class Kind:
    """Equal layers."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self._starts: list[list[int]] = []
        self._sizes: list[int] = []
        self._places: dict[int, Places] = {}  # of the addresses, by signature

    def add(self, layer: int, tensors: Sequence[torch.Tensor]) -> None:
        self.layers.append(layer)
        self._starts.append([tensor.data_ptr() for tensor in tensors])
        self._sizes = [span_of(tensor) for tensor in tensors]

    def words_of(self, layer: int, captured: Captured, before: Recorded | None) -> Words | None:
        """Return the parameters of each layer from those of one; None if the addresses among them are unknown, and `before`, an earlier
        layer's launches, does not show them."""
        if captured.signature not in self._places:
            if before is None or before.captured.signature != captured.signature:
                return None
            words, earlier = captured.words, before.captured.words
            expected = self._moved(layer, words, np.arange(len(words)))[self.layers.index(before.layer)]
            is_address = (expected != words) & (earlier != words)
            if (earlier != expected)[is_address].any():
                return None
            self._places[captured.signature] = np.flatnonzero(is_address)
        return self._moved(layer, captured.words, self._places[captured.signature])

    def _moved(self, layer: int, words: Words, places: Places) -> Words:
        starts_LR = np.array(self._starts, dtype=np.uint64)
        ranges = starts_LR[self.layers.index(layer)]
        return moved(words, places, ranges, ranges + np.array(self._sizes, dtype=np.uint64), starts_LR - ranges)


def place_of(tensor: torch.Tensor | None) -> object:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape)


def shape_of(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def span_of(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first to its last value."""
    if not tensor.numel():
        return 0
    return tensor.itemsize * (1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)))


def inventory(layer: object) -> tuple[object, list[torch.Tensor]]:
    """Return all plain values and shapes that can be reached from a layer, except its number, and the tensors, in the same order."""
    values: list[object] = []
    tensors: list[torch.Tensor] = []
    seen: set[int] = set()

    def visit(each: Any) -> None:
        if isinstance(each, torch.Tensor):
            tensors.append(each)
            values.append(shape_of(each))
        elif isinstance(each, bool | int | float | str | None | torch.dtype):
            values.append(each)
        elif id(each) not in seen:
            seen.add(id(each))
            values.append(type(each))
            for part in parts_of(each):
                visit(part)

    visit(layer)
    return tuple(values), tensors


def parts_of(each: Any) -> Iterator[Any]:
    """Return what a module, a collection, a method or an object of ours holds; nothing of other objects."""
    if isinstance(each, dict):
        yield from each.values()
    elif isinstance(each, tuple | list):
        yield from each
    elif isinstance(each, MethodType):
        yield each.__self__
    elif isinstance(each, partial):
        yield from (each.func, each.args, each.keywords)
    elif isinstance(each, nn.Module) or type(each).__module__.startswith("models."):
        slots = [name for kind in type(each).__mro__ for name in vars(kind).get("__slots__", ()) if hasattr(each, name)]
        values = {name: getattr(each, name) for name in slots} | (vars(each) if hasattr(each, "__dict__") else {})
        yield from (value for name, value in values.items() if name not in ORDINALS)
