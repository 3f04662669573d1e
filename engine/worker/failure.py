"""One-line explanation of a worker's failed start, with a remedy; the debug log has the traceback."""

import torch
import torch.distributed

MAX_CHARACTERS = 300


def explain(problem: Exception) -> str:
    text = str(problem)
    if isinstance(problem, ModuleNotFoundError):
        return f"the package {problem.name} is missing: install the extra with `pip install -e '.[cuda]'`, or serve with --device cpu"
    if isinstance(problem, ImportError):
        return f"a library cannot be loaded: is the driver or CUDA another version? {_line(text)}"
    if isinstance(problem, torch.OutOfMemoryError):
        return f"the GPU's memory is too small: lower --gpu-memory-utilization, or stop other programs on the GPU. {_line(text)}"
    if isinstance(problem, torch.distributed.DistError):
        return f"the GPUs cannot reach each other (NCCL_DEBUG=INFO logs details; try --no-symmetric-memory): {_line(text)}"
    if "building extension" in text or "ninja" in text.lower() or "nvcc" in text:
        return f"kernels could not be compiled: are nvcc and a C++ compiler of its CUDA version installed? {_line(text)}"
    return _line(text) or type(problem).__name__


def _line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return first if len(first) <= MAX_CHARACTERS else first[:MAX_CHARACTERS] + " ..."
