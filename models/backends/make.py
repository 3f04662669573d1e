"""Makes the backend that was chosen. Called by the workers; everything else is handed the result."""

import torch

from models.backends.backend import Backend
from models.backends.choose import BackendName


def make_backend(name: BackendName, device: torch.device) -> Backend:
    """The backend of this name. Imports what it needs only now: a CPU machine lacks Triton."""
    if name == "hopper":
        from models.backends.hopper.backend import HopperBackend

        return HopperBackend(device)
    if name == "portable":
        from models.backends.portable.backend import PortableBackend

        return PortableBackend(device)
    from models.backends.torch.backend import TorchBackend

    return TorchBackend(device)
