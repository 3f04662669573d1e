"""One transfer to the device per step: small arrays are packed into a pinned buffer and become views of one device buffer."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.messages import DEPTH
from models.kernels.transfers import Transfers

ALIGNMENT = 128  # pieces that kernels read at once must not straddle two cache lines
RING = DEPTH + 1  # steps in flight, and the one being built


class Staging:
    """Staging buffers. Call `begin`, `put` for every array, then `copy`, which may be repeated after further arrays: until the copies after
    the next `begin` the returned tensors hold the data, in stream order. Equal sizes in equal order have equal addresses, as CUDA graphs
    require. The ring has one buffer more than steps in flight."""

    def __init__(self, num_bytes: int, device: torch.device, transfers: Transfers | None = None):
        self._transfers = transfers or Transfers()
        pinned = device.type == "cuda"
        self._hosts = [torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(RING if pinned else 1)]
        self._bytes = [host.numpy() for host in self._hosts]
        self._device = torch.empty(num_bytes, dtype=torch.uint8, device=device) if pinned else self._hosts[0]
        self._index = 0
        self._used = self._copied = 0

    def begin(self) -> None:
        self._index = (self._index + 1) % len(self._hosts)
        self._used = self._copied = 0

    def put(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """Return a device tensor of `array`'s shape and type that `copy` fills. AssertionError if the buffer is too small for the step."""
        start, written = self._used, self.write(array)
        return self._device[start : start + written.nbytes].view(torch.from_numpy(written).dtype).view(array.shape)

    def write(self, array: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """As `put`, for tensors known from an earlier step of equal sizes; return the array's host memory."""
        start, end = self._used, self._used + array.nbytes
        host = self._bytes[self._index]
        assert end <= len(host), f"a step needs more than {len(host)} bytes of staging"
        written = host[start:end].view(array.dtype).reshape(array.shape)
        written[...] = array
        self._used = start + staged_bytes([array])
        return written

    def rest(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the rest of the device buffer, where the next `put` is located."""
        return self._device[self._used : len(self._device) // ALIGNMENT * ALIGNMENT].view(dtype)

    def copy(self) -> None:
        if self._device is not self._hosts[self._index]:
            new = slice(self._copied, self._used)
            self._transfers.fetch_(self._device[new], self._hosts[self._index][new])
        self._copied = self._used


def staged_bytes(arrays: Iterable[npt.NDArray[np.generic]]) -> int:
    """Return the staged size of these arrays in a buffer of their own."""
    return sum(-(-array.nbytes // ALIGNMENT) * ALIGNMENT for array in arrays)
