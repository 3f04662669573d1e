"""Launches of a piece of a model, captured once and repeated with other addresses.

    stream ── capture ──▶ CUDA graph ── functions, grids, parameters ──▶ `Captured` ── other addresses ──▶ the driver's launches

Python needs 0.3 to 0.9 ms for the launches of a layer, the driver 0.03 to 0.06. Parameters are copied as they are: aligned words of eight
bytes, of which addresses in given ranges are moved, also the one at the start of a descriptor of the tensor memory accelerator.
`captured.c` reads and launches; it is compiled when it is needed first, as Triton compiles its launches, and cached.
"""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("captured.c")
CACHE = Path("~/.cache/mini-vlm-engine")
RELAXED = 2  # CUstreamCaptureMode: other threads, and torch's allocator in this one, may allocate
WORD = 8

Words = npt.NDArray[np.uint64]
Places = npt.NDArray[np.int64]  # of words


class Unsupported(Exception):
    """The captured work cannot be repeated."""


class LaunchFailed(RuntimeError):
    """The driver refused a repeated launch; those before it run."""


@cache
def library() -> ctypes.PyDLL | None:
    """Return `captured.c`, compiled; None, with one line in the log, without a compiler or a driver."""
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        found = ctypes.PyDLL(str(built(CACHE.expanduser())))
    except OSError as problem:
        logger.warning("launches of layers are not repeated: %s", problem)
        return None
    found.captured_bytes.restype = ctypes.c_size_t
    found.captured_run.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_size_t]
    found.captured_read.argtypes = [ctypes.c_void_p] * 3
    return found


def built(folder: Path) -> Path:
    """Return the compiled source in this folder. OSError if it cannot be compiled."""
    triton = find_spec("triton")
    include = Path(triton.origin).parent / "backends/nvidia/include" if triton is not None and triton.origin else Path()
    compiler = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), "cc")
    path = folder / f"captured-{hashlib.sha256(SOURCE.read_bytes() + str(include).encode()).hexdigest()[:16]}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            command = [compiler, "-O2", "-shared", "-fPIC", "-I", str(include), str(SOURCE), "-o", f"{made}/captured.so"]
            if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
                raise OSError(done.stderr)
            os.replace(f"{made}/captured.so", path)
    return path


def can_capture() -> bool:
    """Return whether the current stream is one that can be captured: a GPU's, but not its default one."""
    if not torch.cuda.is_initialized() or torch.cuda.current_stream().cuda_stream == 0 or torch.cuda.is_current_stream_capturing():
        return False
    return library() is not None


def capture(call: Callable[[], object]) -> "Captured":
    """Capture the launches of `call` on the current stream without executing them. Unsupported if they cannot be repeated; nothing was
    executed then, either."""
    cuda, stream, graph = ctypes.PyDLL("libcuda.so.1"), torch.cuda.current_stream().cuda_stream, ctypes.c_void_p()
    first = one_value()
    check(cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), RELAXED))
    try:
        first.add_(1)  # a kernel before the others, which is not repeated
        call()
    finally:
        error = cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
    check(error)
    try:
        return Captured(graph, stream)
    finally:
        cuda.cuGraphDestroy(graph)


@cache
def one_value() -> torch.Tensor:
    return torch.zeros(1, device="cuda")


def check(error: int) -> None:
    if error:
        raise Unsupported("other work than kernels" if error < 0 else f"CUDA's error {error}")


class Captured:
    """The launches of a graph in their order, and their parameters as words."""

    def __init__(self, graph: ctypes.c_void_p, stream: int) -> None:
        found = library()
        assert found is not None
        self._memory, self._stream, self._run = np.empty(found.captured_bytes(), dtype=np.uint8), stream, found.captured_run
        self._problem = ctypes.create_string_buffer(512)
        self._address = self._memory.ctypes.data
        check(found.captured_read(graph, stream, self._address))
        fields: Words = self._memory.view(np.uint64)
        self.signature, self.words = int(fields[1]), fields[2 : 2 + int(fields[0])]  # equal for equal functions

    def run(self, words: Words) -> None:
        """Launch with these parameters."""
        if self._run(self._address, self._stream, words.ctypes.data, self._problem, len(self._problem)):
            raise LaunchFailed(self._problem.value.decode())


def moved(words: Words, places: Places, starts_R: Words, ends_R: Words, distances_CR: Words) -> Words:
    """Return C copies of the words; those at these places that are in a range are moved by its distance in each copy. A range inside
    another one is moved with it."""
    order = np.lexsort((-ends_R.astype(np.int64), starts_R))
    outer = order[ends_R[order] > np.concatenate(([0], np.maximum.accumulate(ends_R[order])[:-1]))]
    index = np.searchsorted(starts_R[outer], words[places], side="right").astype(np.int64) - 1
    inside = (index >= 0) & (words[places] < ends_R[outer][index])
    copies = np.repeat(words[None], len(distances_CR), axis=0)
    copies[:, places[inside]] += distances_CR[:, outer[index[inside]]]
    return copies
