"""Mapping of checkpoint tensors to parts of parameters, declared by layers and used by `models.checkpoint.load`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """`target.copy_(tensor[index]).add_(offset)` for the checkpoint's tensor `name`, which must have this shape. `target` is a view."""

    name: str
    shape: tuple[int, ...]
    index: Index
    target: torch.Tensor
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class OneOf:
    """Alternative layouts of the same parameters, distinguished by names and shapes."""

    ways: tuple[tuple[CheckpointTensor, ...], ...]


CheckpointPart = CheckpointTensor | OneOf


@runtime_checkable
class HasCheckpointTensors(Protocol):
    """Module whose parameters do not correspond one to one to tensors of the checkpoint."""

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointPart]:
        """Return the tensors of the module at the dotted path `prefix`, which is the checkpoint's except for fused layers."""


def module_tensors(module: nn.Module, prefix: str) -> Iterator[CheckpointPart]:
    """Return the tensors of a module and its children; a plain parameter is the checkpoint tensor of the same path."""
    if isinstance(module, HasCheckpointTensors):
        yield from module.checkpoint_tensors(prefix)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield CheckpointTensor(f"{prefix}.{name}", tuple(parameter.shape), (slice(None),), parameter.data)
    for name, child in module.named_children():
        yield from module_tensors(child, f"{prefix}.{name}")
