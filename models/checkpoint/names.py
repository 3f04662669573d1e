"""Which part of which checkpoint tensor goes into which part of a parameter: layers declare it, `models.checkpoint.load` fills."""

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
    """Complete ways in which checkpoints hold the same parameters, told apart by names and shapes."""

    ways: tuple[tuple[CheckpointTensor, ...], ...]


CheckpointPart = CheckpointTensor | OneOf


@runtime_checkable
class HasCheckpointTensors(Protocol):
    """A module whose parameters are not the checkpoint's tensors one to one."""

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointPart]:
        """`prefix` is the dotted path of this module, which is that of the checkpoint except for fused layers."""


def module_tensors(module: nn.Module, prefix: str) -> Iterator[CheckpointPart]:
    """Those of a module and all below it; a plain parameter is the whole checkpoint tensor of the same path."""
    if isinstance(module, HasCheckpointTensors):
        yield from module.checkpoint_tensors(prefix)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield CheckpointTensor(f"{prefix}.{name}", tuple(parameter.shape), (slice(None),), parameter.data)
    for name, child in module.named_children():
        yield from module_tensors(child, f"{prefix}.{name}")
