"""Construction of the chosen backend."""

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
