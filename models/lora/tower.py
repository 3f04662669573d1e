"""Linear layers of the vision tower with adapters. The images of one call have the same adapter, which is added to each matrix when it is
read, so that one matrix at a time needs memory."""

from dataclasses import dataclass

import torch

from models.checkpoint.names import CheckpointTensor, module_tensors
from models.layers.linear import Linear


class TowerSlot:
    current = -1  # slot of the adapter of the current call; -1: none


@dataclass(frozen=True, slots=True)
class Change:
    """Low-rank matrices of all slots that a layer's matrix gets."""

    a_SRK: torch.Tensor
    b_SNR: torch.Tensor
    slot: TowerSlot

    def applied(self, weight: torch.Tensor) -> torch.Tensor:
        current = self.slot.current
        return weight if current < 0 else torch.addmm(weight, self.b_SNR[current], self.a_SRK[current])


def adapt_linear(layer: Linear, num_slots: int, rank: int, slot: TowerSlot) -> Change:
    """Let the layer multiply by the changed matrix."""
    weight = layer.weight.data
    change = Change(weight.new_zeros((num_slots, rank, weight.shape[1])), weight.new_zeros((num_slots, weight.shape[0], rank)), slot)
    layer.change = change.applied
    return change


def rows_of(layer: Linear, path: str) -> list[tuple[slice, slice]]:
    """Return rows of the layer's matrix and the rows of the checkpoint's that they are."""
    found = []
    for part in module_tensors(layer, path):
        if isinstance(part, CheckpointTensor) and part.name == f"{path}.weight":
            first = (part.target.storage_offset() - layer.weight.storage_offset()) // layer.weight.shape[1]
            found.append((slice(first, first + len(part.target)), part.index[0]))
    return found
