"""Distribution of a step's images over the ranks: encoded by all ranks, each a part of the patches, or by a single rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class UlyssesCosts(NamedTuple):
    """Costs in units of a rank's matrix products for one patch in all layers."""

    fixed: int  # latency of the exchanges of all layers
    exchanged: float  # transfer of one patch that all ranks encode
    square: int  # patches of an image at which attention costs as much as the matrices


# By backend; `hopper` of H200s, where a patch takes 1.84 us, `portable` estimated for GPUs that communicate over PCIe.
COSTS = {"hopper": UlyssesCosts(7600, 0.1, 9500), "portable": UlyssesCosts(8000, 2.0, 6600), "torch": UlyssesCosts(64, 0.05, 6600)}


@dataclass(frozen=True, slots=True)
class Shares:
    """Indexes of images: those that all ranks encode together, and those that each rank encodes alone."""

    together: tuple[int, ...]
    alone: tuple[tuple[int, ...], ...]


def share_out(num_patches: Sequence[int], num_ranks: int, costs: UlyssesCosts | None) -> Shares:
    """Minimise the time of the slowest rank: all ranks encode some of the largest images (none without `costs`); the others go to the least
    loaded rank each, the largest first."""
    order = sorted(range(len(num_patches)), key=lambda image: (-num_patches[image], image))
    work = [count * (1 + count / costs.square) if costs else count for count in num_patches]
    best, least = Shares((), ()), float("inf")
    for num_together in range(1 + (min(num_ranks, len(order)) if costs and num_ranks > 1 else 0)):
        together = order[:num_together]
        alone: list[list[int]] = [[] for _ in range(num_ranks)]
        loads = [0.0] * num_ranks
        for image in order[num_together:]:
            rank = loads.index(min(loads))
            loads[rank] += work[image]
            alone[rank].append(image)
        total = max(loads)
        if costs and together:
            total += costs.fixed + sum(work[image] / num_ranks + costs.exchanged * num_patches[image] for image in together)
        if total < least:
            best, least = Shares(tuple(together), tuple(map(tuple, alone))), total
    return best


def part_of(total: int, rank: int, num_ranks: int) -> range:
    return range(total * rank // num_ranks, total * (rank + 1) // num_ranks)
