"""A case, and the device time of one call of it."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

REPLAYS = 5
L2_BYTES = 256 << 20  # inputs are rotated until they are this large together, so that no cache holds them


@dataclass(frozen=True, slots=True)
class Case:
    """A kernel at one shape. `calls` do the same on different data; all bytes that must move and all operations are those of one call."""

    name: str
    shape: str
    flops: float
    num_bytes: float
    calls: Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What this device achieved just before."""

    flops_per_s: float
    bytes_per_s: float

    @classmethod
    def measure(cls, device: torch.device) -> "Ceilings":
        """A large matrix product in bfloat16, and a negated copy (read and written bytes both count)."""
        a, b = (torch.randn((8192, 8192), dtype=torch.bfloat16, device=device) for _ in range(2))
        source = torch.randn(1 << 28, device=device)
        target = torch.empty_like(source)
        product = seconds_per_call([lambda: a @ b])
        copy = seconds_per_call([lambda: torch.neg(source, out=target)])  # a plain copy in a graph is left to the slower copy engines
        return cls(2 * 8192**3 / product, 2 * source.nbytes / copy)

    def bound(self, case: Case) -> float:
        """Seconds below which no version of the kernel can run."""
        return max(case.flops / self.flops_per_s, case.num_bytes / self.bytes_per_s)


def copies(num_bytes: float) -> int:
    """How many inputs of this size a case rotates through."""
    return max(1, min(16, round(L2_BYTES / num_bytes)))


def seconds_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Device time of one call, launches hidden in a CUDA graph; the median of some replays."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)
