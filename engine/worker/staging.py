"""One host-to-device copy per step: small arrays are packed into a pinned buffer and become views of one device buffer.

Used by the runner. The ring has one buffer more than there are steps in flight, so no pinned buffer is written while its copy may run.
"""

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT = 16
RING = 3  # two steps in flight, one being built


class Staging:
    """Call `begin`, `put` for every array, then `copy`: from then on the returned tensors hold the data, in stream order.

    The tensors are views of one device buffer and are valid until the next `copy`. On a CPU they are views of the host buffer.
    """

    def __init__(self, num_bytes: int, device: torch.device):
        pinned = device.type == "cuda"
        self._hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(RING if pinned else 1)]
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device) if pinned else self._hosts[0]
        self._index = 0
        self._used = 0

    def begin(self) -> None:
        """Starts a step's packing."""
        self._index = (self._index + 1) % len(self._hosts)
        self._used = 0

    def put(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """A device tensor of `array`'s shape and type that `copy` fills. AssertionError if the buffer is too small for the step."""
        start = self._used
        end = start + array.nbytes
        host = self._hosts[self._index]
        assert end <= host.numel(), f"a step needs more than {host.numel()} bytes of staging"
        source = torch.from_numpy(np.ascontiguousarray(array))
        host[start:end].view(source.dtype).view(source.shape).copy_(source)
        self._used = -(-end // ALIGNMENT) * ALIGNMENT
        return self._device[start:end].view(source.dtype).view(source.shape)

    def copy(self) -> None:
        """Enqueues the one copy on the current stream."""
        if self._device is not self._hosts[self._index]:
            self._device[: self._used].copy_(self._hosts[self._index][: self._used], non_blocking=True)
