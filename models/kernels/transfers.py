"""Copies between host and device that wait for nobody."""

import numpy as np
import numpy.typing as npt
import torch


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, enqueued; on a CPU the values themselves."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy by way of pinned memory, which torch gives to nobody before it is done; on a CPU the array itself."""
    host = torch.from_numpy(array)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host


class Transfers:
    """What every step copies, by torch; enqueued on the current stream. Host memory is pinned if the device is a GPU."""

    def fetch_(self, device_B: torch.Tensor, host_B: torch.Tensor) -> None:
        """device = host, bytes."""
        device_B.copy_(host_B, non_blocking=True)

    def deliver_(self, tokens_S: torch.Tensor, rows_S: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
        """last_tokens[rows] = tokens, all int64 on the device. Returns the tokens on the host, there once the stream has come so far."""
        last_tokens.index_copy_(0, rows_S, tokens_S)
        return to_host(tokens_S)
