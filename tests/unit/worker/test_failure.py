"""A worker that cannot start says why in one line, and what to do. Red if a user reads a traceback, or a page of a compiler's output."""

import torch
import torch.distributed

from engine.worker.failure import explain

NINJA = """Error building extension 'attention': [1/3] /usr/local/cuda/bin/nvcc --generate-dependencies-with-compile -c attention.cu
FAILED: attention.cuda.o
/usr/local/cuda/bin/nvcc -DTORCH_EXTENSION_NAME=attention ...
attention.cu(12): error: identifier "foo" is undefined
1 error detected in the compilation of "attention.cu".
ninja: build stopped: subcommand failed."""

CASES = [
    (ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer"), ["flashinfer", "pip install", "--device cpu"]),
    (ImportError("libnvjpeg.so.13: cannot open shared object file: No such file or directory"), ["libnvjpeg.so.13", "driver"]),
    (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB"), ["--gpu-memory-utilization", "Tried to allocate"]),
    (torch.distributed.DistBackendError("NCCL error in: x.cpp:3, system error\nLast error:\nno route"), ["NCCL_DEBUG", "system error"]),
    (RuntimeError(NINJA), ["nvcc", 'identifier "foo" is undefined']),
    (RuntimeError("Ninja is required to load C++ extensions"), ["compiler", "Ninja is required"]),
    (ValueError("--tp 2 needs as many GPUs; there are 1"), ["--tp 2"]),
    (RuntimeError("\n\n" + "x" * 5000), ["xxx"]),
    (RuntimeError(), ["RuntimeError"]),
]


def test_one_line_that_says_what_to_do() -> None:
    for problem, words in CASES:
        line = explain(problem)
        assert "\n" not in line and len(line) < 500 and all(word in line for word in words), line
