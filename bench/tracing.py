"""Engine whose worker records its kernels: `python -m bench.tracing FILE [flags of engine.serve]`.

SIGNAL to the worker starts a recording and creates FILE.started. The next one ends it and replaces that by FILE, a `Recording`. A worker
whose file is called EXPERTS counts distinct experts instead.
"""

import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

import engine.worker.main
from bench.experts import ExpertCounter
from bench.processes import serve_with

EXPERTS = "experts"
SIGNAL = signal.SIGRTMIN  # LLVM, with which Triton compiles, replaces handlers of SIGUSR1


@dataclass(frozen=True, slots=True)
class Recording:
    """Kernels of all streams; times are in milliseconds."""

    span: float  # from the first kernel to the last
    gaps: list[tuple[float, str, str]]  # times in which none ran, with the kernels before and after, the longest first
    kernels: list[tuple[str, int, float]]  # name, number of calls and time of all of them, the longest first
    experts: list[tuple[float, float]]  # distinct ones per step and their expected number, for each layer


def recording_of(kernels: Sequence[FunctionEvent]) -> Recording:
    first, *others = sorted(kernels, key=lambda kernel: kernel.time_range.start)
    gaps, busy_until, last = [], first.time_range.end, first.name
    for kernel in others:
        if kernel.time_range.start > busy_until:
            gaps.append(((kernel.time_range.start - busy_until) / 1e3, last, kernel.name))
        if kernel.time_range.end > busy_until:
            busy_until, last = kernel.time_range.end, kernel.name
    times: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        times[kernel.name].append(kernel.time_range.elapsed_us() / 1e3)
    totals = [(name, len(taken), sum(taken)) for name, taken in times.items()]
    span = (busy_until - first.time_range.start) / 1e3
    return Recording(span, sorted(gaps, reverse=True), sorted(totals, key=lambda total: -total[-1]), [])


def record_on_signal(path: Path) -> None:
    """Handle SIGNAL. Without a GPU, operations on the CPU are recorded."""
    activity, device = ProfilerActivity.CPU, DeviceType.CPU
    if torch.cuda.is_available():
        activity, device = ProfilerActivity.CUDA, DeviceType.CUDA
    started, recording, counter = Path(f"{path}.started"), profile(activities=[activity]), None
    if path.name == EXPERTS:
        counter = ExpertCounter()
        counter.watch()

    def handle(*_: object) -> None:
        nonlocal recording
        if device == DeviceType.CUDA:
            torch.cuda.synchronize()
        if not started.exists():
            counter.reset() if counter else recording.start()
            started.touch()
            return
        if counter:
            found = Recording(0.0, [], [], counter.layers())
        else:
            recording.stop()
            found = recording_of([event for event in recording.events() or () if event.device_type == device])
            recording = profile(activities=[activity])
        started.write_bytes(msgspec.json.encode(found))
        started.rename(path)

    signal.signal(SIGNAL, handle)


def main() -> int:
    """Entry point of the launcher, or of the worker, whose first argument is a file."""
    if not sys.argv[1].endswith(".json"):
        return serve_with("engine.worker.main", "bench.tracing", sys.argv[1:2], sys.argv[2:])
    record_on_signal(Path(sys.argv.pop()))
    engine.worker.main.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
