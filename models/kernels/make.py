"""Makes the backend that was chosen."""

import sys
from collections.abc import Callable

import torch

from models.kernels.backend import Backend
from models.kernels.choose import BackendName


def make_backend(name: BackendName, device: torch.device) -> Backend:
    """Imports what it needs only now: a CPU machine lacks Triton."""
    if name == "hopper":
        from models.kernels.hopper.backend import HopperBackend

        return HopperBackend(device)
    if name == "portable":
        from models.kernels.triton.backend import PortableBackend

        return PortableBackend(device)
    from models.kernels.reference.backend import TorchBackend

    return TorchBackend(device)


def notify_compilation(begin: Callable[[], None], end: Callable[[], None]) -> None:
    """Calls these around every compilation by Triton: seconds, at sizes that warm-up has not met."""
    if "triton" not in sys.modules:
        return
    from triton import knobs

    def before(**of_triton: object) -> None:  # anything true would keep it from compiling
        begin()

    def after(**of_triton: object) -> None:
        end()

    knobs.runtime.jit_cache_hook = before
    knobs.runtime.jit_post_compile_hook = after
