"""Which part of which checkpoint tensor goes into which part of a parameter. Declared by the layers, filled by `models.weights`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Slot:
    """`target.copy_(tensor[index])` for the checkpoint's tensor `name`, which must have this full shape. `target` is a view."""

    name: str
    shape: tuple[int, ...]
    index: Index
    target: torch.Tensor


@runtime_checkable
class HasSlots(Protocol):
    """A module whose parameters are not the checkpoint's tensors one to one: it says itself where its parts come from."""

    def checkpoint_slots(self, prefix: str) -> Iterator[Slot]:
        """`prefix` is the dotted path of this module, which is that of the checkpoint except for fused layers."""


def module_slots(module: nn.Module, prefix: str) -> Iterator[Slot]:
    """The slots of a module and all below it; a plain parameter is the whole checkpoint tensor of the same path."""
    if isinstance(module, HasSlots):
        yield from module.checkpoint_slots(prefix)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield Slot(f"{prefix}.{name}", tuple(parameter.shape), (slice(None),), parameter.data)
    for name, child in module.named_children():
        yield from module_slots(child, f"{prefix}.{name}")
