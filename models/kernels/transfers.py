"""Asynchronous copies between host and device."""

import numpy as np
import numpy.typing as npt
import torch


def to_host(values: torch.Tensor) -> torch.Tensor:
    """Enqueue a copy to pinned memory; on a CPU return the values."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy through pinned memory, which torch does not reuse before the copy is done; on a CPU return the array."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Transfers:
    """Copies of every step with torch, enqueued on the current stream. Host memory is pinned if the device is a GPU."""

    def fetch_(self, device_B: torch.Tensor, host_B: torch.Tensor) -> None:
        """device = host, bytes."""
        device_B.copy_(host_B, non_blocking=True)

    def deliver_(self, tokens_S: torch.Tensor, rows_S: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
        """last_tokens[rows] = tokens, int64 on the device. Return the tokens on the host, valid once the stream has reached this point."""
        last_tokens.index_copy_(0, rows_S, tokens_S)
        return to_host(tokens_S)
