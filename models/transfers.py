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
