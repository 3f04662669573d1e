"""Which images of a step all ranks encode together, a part of the patches each, and which one rank encodes alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class SplitCosts(NamedTuple):
    """In patches: the time in which a rank's matrices multiply one patch in all layers is one."""

    fixed: int  # of the exchanges of all layers, whatever they carry
    exchanged: float  # of a patch that is encoded by all ranks: its part of the exchanges
    square: int  # of so many patches of an image, attention takes as long as the matrices


@dataclass(frozen=True, slots=True)
class Shares:
    """Indexes of images: those that all ranks encode together, and those that each rank encodes alone."""

    together: tuple[int, ...]
    alone: tuple[tuple[int, ...], ...]


def share_out(num_patches: Sequence[int], num_ranks: int, costs: SplitCosts | None) -> Shares:
    """So that the slowest rank is done soonest: some of the largest images by all ranks (none without `costs`), each of the others by one,
    the largest first to the least loaded rank."""
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
