"""What goes between host and device in each step, beside images: small arrays there, drawn tokens back. A backend says how."""

from typing import Protocol

import torch


class Transfers(Protocol):
    """Both are enqueued on the current stream. Host memory is pinned if the device is a GPU."""

    def fetch_(self, device_B: torch.Tensor, host_B: torch.Tensor) -> None:
        """device = host, bytes."""

    def deliver_(self, tokens_S: torch.Tensor, rows_S: torch.Tensor, last_token_R: torch.Tensor) -> torch.Tensor:
        """last_token[rows] = tokens, all int64 on the device. Returns the tokens on the host, there once the stream has come so far; on a
        CPU the tokens themselves."""


class Copies:
    """See `Transfers`: torch's own, for any device."""

    def fetch_(self, device_B: torch.Tensor, host_B: torch.Tensor) -> None:
        device_B.copy_(host_B, non_blocking=True)

    def deliver_(self, tokens_S: torch.Tensor, rows_S: torch.Tensor, last_token_R: torch.Tensor) -> torch.Tensor:
        last_token_R[rows_S] = tokens_S
        return to_host(tokens_S)


COPIES = Copies()


def to_host(values: torch.Tensor) -> torch.Tensor:
    """A copy in pinned memory, enqueued; on a CPU the values themselves."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
