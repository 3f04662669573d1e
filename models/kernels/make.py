"""Construction of the chosen backend."""

import sys
from collections.abc import Callable

import torch

from models.kernels.backend import Backend
from models.kernels.choose import BackendName


def make_backend(name: BackendName, device: torch.device) -> Backend:
    """Return the backend. Imports are local: a CPU machine lacks Triton."""
    if name == "hopper":
        from models.kernels.hopper.backend import HopperBackend

        return HopperBackend(device)
    if name == "portable":
        from models.kernels.triton.backend import PortableBackend

        return PortableBackend(device)
    from models.kernels.reference.backend import TorchBackend

    return TorchBackend(device)


def notify_compilation(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Call these around every compilation by Triton, which takes seconds at sizes that the warm-up did not cover."""
    if "triton" not in sys.modules:
        return
    from triton import knobs

    def before(**of_triton: object) -> None:  # a true result would prevent the compilation
        begin()

    def after(**of_triton: object) -> None:
        end()

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = after
