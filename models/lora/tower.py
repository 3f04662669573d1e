"""Linear layers of the vision tower with adapters. The images of one call have the same adapter, which is added to each matrix when it is
read: one matrix at a time needs memory, and a call without an adapter reads the layer's own."""

import torch
from torch import nn
from torch.nn.utils import parametrize

from models.checkpoint.names import CheckpointTensor, module_tensors
from models.layers.linear import Linear


class TowerSlot:
    """Slot of the adapter of the current call; -1: none."""

    current = -1


class AdaptedWeight(nn.Module):
    """A layer's matrix plus that of the current slot, of A (slots, rank, inputs) and B (slots, outputs, rank)."""

    def __init__(self, weight: torch.Tensor, num_slots: int, rank: int, slot: TowerSlot) -> None:
        super().__init__()
        self._slot = slot
        self.a_SRK = weight.new_zeros((num_slots, rank, weight.shape[1]))
        self.b_SNR = weight.new_zeros((num_slots, weight.shape[0], rank))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        slot = self._slot.current
        return weight if slot < 0 else torch.addmm(weight, self.b_SNR[slot], self.a_SRK[slot])


def adapt_linear(layer: Linear, num_slots: int, rank: int, slot: TowerSlot) -> AdaptedWeight:
    adapted = AdaptedWeight(layer.weight.data, num_slots, rank, slot)
    parametrize.register_parametrization(layer, "weight", adapted)
    return adapted


def rows_of(layer: Linear, path: str) -> list[tuple[slice, slice]]:
    """Return rows of the layer's matrix and the rows of the checkpoint's that they are. Call it before `adapt_linear`."""
    found = []
    for part in module_tensors(layer, path):
        if isinstance(part, CheckpointTensor) and part.name == f"{path}.weight":
            first = (part.target.storage_offset() - layer.weight.storage_offset()) // layer.weight.shape[1]
            found.append((slice(first, first + len(part.target)), part.index[0]))
    return found
