"""Device times of a step's parts, without waiting."""

import time

import torch


class Stopwatch:
    """Marks on the current stream, the first made at once: CUDA events, or clock readings on a CPU."""

    def __init__(self, on_gpu: bool):
        self._on_gpu = on_gpu
        self.events: list[torch.cuda.Event] = []
        self._times: list[float] = []
        self.mark()

    def mark(self) -> None:
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append(event)
        else:
            self._times.append(time.monotonic())

    def has_begun(self) -> bool:
        """Return whether a GPU has passed the first mark."""
        return bool(self.events) and self.events[0].query()

    def is_done(self) -> bool:
        return not self.events or self.events[-1].query()

    def wait(self) -> None:
        if self.events:
            self.events[-1].synchronize()

    def elapsed_ms(self) -> float:
        if self.events:
            return self.events[0].elapsed_time(self.events[-1])
        return 1e3 * (self._times[-1] - self._times[0])
