"""Mapping of checkpoint tensors to parts of parameters, declared by layers and used by `models.checkpoint.load`."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

Index = tuple[slice, ...]


class Stored(Protocol):
    """A tensor of which slices can be read, on any device."""

    def get_shape(self) -> Sequence[int]:
        """Return the shape of the whole tensor."""

    def get_dtype(self) -> str:
        """Return the dtype by its name in safetensors."""

    def __getitem__(self, index: Index) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class CheckpointTensor:
    """The operation `target.copy_(tensor[index]).add_(offset)` for the checkpoint's tensor `name`, which must have this shape. `target` is
    a view."""

    name: str
    shape: tuple[int, ...]
    index: Index
    target: torch.Tensor
    offset: float = 0.0

    def read(self, stored: Stored) -> None:
        if self.target.numel():
            self.target.copy_(stored[self.index])
            if self.offset:
                self.target.add_(self.offset)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Alternative layouts of the same parameters, distinguished by names and shapes."""

    layouts: tuple[tuple[CheckpointTensor, ...], ...]


CheckpointPart = CheckpointTensor | OneOf


@runtime_checkable
class HasCheckpointTensors(Protocol):
    """Module whose parameters do not correspond one to one to tensors of the checkpoint."""

    def checkpoint_tensors(self, prefix: str) -> Iterator[CheckpointPart]:
        """Return the tensors of the module at the dotted path `prefix`, which is the checkpoint's except for fused layers."""


def module_tensors(module: nn.Module, prefix: str) -> Iterator[CheckpointPart]:
    """Return the tensors of a module and its children; a plain parameter is the checkpoint tensor of the same path."""
    for leaf, path in leaves(module, prefix):
        yield from own_tensors(leaf, path)


def leaves(module: nn.Module, prefix: str) -> Iterator[tuple[nn.Module, str]]:
    """Return the modules that declare tensors, with their paths."""
    yield module, prefix
    if not isinstance(module, HasCheckpointTensors):
        for name, child in module.named_children():
            yield from leaves(child, f"{prefix}.{name}")


def own_tensors(module: nn.Module, prefix: str) -> Iterator[CheckpointPart]:
    """Return the tensors of a module without those of its children."""
    if isinstance(module, HasCheckpointTensors):
        yield from module.checkpoint_tensors(prefix)
        return
    for name, parameter in module.named_parameters(recurse=False):
        yield CheckpointTensor(f"{prefix}.{name}", tuple(parameter.shape), (slice(None),), parameter.data)
