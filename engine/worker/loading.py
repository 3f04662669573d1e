"""Kernels are compiled and checked in a thread while weights are read. Used by `build`.

Meanwhile a file in the run directory says so, by which the api tells `/health` that it is not hung.
"""

from concurrent.futures import ThreadPoolExecutor

import torch

from engine.ipc import Child
from models.backends.backend import Backend
from models.config import ModelConfig


class Loading:
    """`backend.load` for a model; `wait` before the first forward pass."""

    def __init__(self, child: Child, backend: Backend, config: ModelConfig) -> None:
        self._mark = child.compiling_mark()
        self._mark.touch()
        self._backend, self._heads = backend, (config.text.head_dim, config.vision.head_dim)
        self._pool = ThreadPoolExecutor(1, "compile")
        self._loaded = self._pool.submit(self._load)

    def _load(self) -> None:
        if self._backend.device.type == "cuda":
            torch.cuda.set_device(self._backend.device)  # a thread has its own
        self._backend.load(*self._heads)

    def wait(self) -> None:
        """RuntimeError if a compiler fails or a kernel computes what it should not."""
        try:
            self._loaded.result()
        finally:
            self._mark.unlink(missing_ok=True)
            self._pool.shutdown()
