"""Times of a step's parts on the device, without waiting for it."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Marks:
    """Points of a step in stream order: CUDA events, or clock readings on a CPU."""

    events: tuple[torch.cuda.Event, ...]
    times: tuple[float, ...]

    def is_done(self) -> bool:
        return not self.events or self.events[-1].query()

    def wait(self) -> None:
        if self.events:
            self.events[-1].synchronize()

    def spans_ms(self) -> list[float]:
        """Milliseconds between consecutive marks; the step must be done."""
        if self.events:
            return [first.elapsed_time(second) for first, second in zip(self.events, self.events[1:], strict=False)]
        return [(second - first) * 1e3 for first, second in zip(self.times, self.times[1:], strict=False)]


class Stopwatch:
    """Collects the marks of one step on the current stream."""

    def __init__(self, on_gpu: bool):
        self._on_gpu = on_gpu
        self._events: list[torch.cuda.Event] = []
        self._times: list[float] = []

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._times.append(time.monotonic())

    def marks(self) -> Marks:
        return Marks(tuple(self._events), tuple(self._times))
