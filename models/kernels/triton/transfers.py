"""`Transfers` by Triton kernels that read and write pinned host memory: calls of a copy engine cost more host time, and the device idles
some microseconds around each."""

import torch
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.transfers import Transfers
from models.kernels.triton.launch import await_kernel, cdiv, kernel

LINE = 128  # bytes
LINES = 32  # per program
MOST_BYTES = 1 << 16  # a copy engine is faster for more
ROWS = 128  # per program


@kernel(do_not_specialize=["num_lines"])
def _fetch(host: tensor, target: tensor, num_lines: tensor, LINES: constexpr) -> None:
    """One program: LINES lines of 16 int64."""
    place = tl.program_id(0) * LINES * 16 + tl.arange(0, LINES * 16)
    inside = place < num_lines * 16
    tl.store(target + place, tl.load(host + place, inside, cache_modifier=".cv"), inside)


@kernel(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["tokens", "rows", "host"])
def _deliver(
    tokens: tensor, rows: tensor, last_tokens: tensor, host: tensor, num_rows: tensor, ROWS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: ROWS tokens."""
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = index < num_rows
    await_kernel(OVERLAP)
    token = tl.load(tokens + index, inside)
    tl.store(last_tokens + tl.load(rows + index, inside), token, inside)
    tl.store(host + index, token, inside)


class TritonTransfers(Transfers):
    """Transfers of a GPU. Each kernel runs once at startup, so that no request waits for a compilation."""

    def __init__(self, device: torch.device) -> None:
        device_B, host_B = (torch.zeros(LINE, dtype=torch.uint8, device=place) for place in (device, "cpu"))
        self.fetch_(device_B, host_B.pin_memory() if device_B.is_cuda else host_B)
        self.deliver_(*torch.zeros((3, 1), dtype=torch.int64, device=device))

    def fetch_(self, device_B: torch.Tensor, host_B: torch.Tensor) -> None:
        num_lines, rest = divmod(device_B.nbytes, LINE)
        if rest or device_B.nbytes > MOST_BYTES:
            super().fetch_(device_B, host_B)
        elif num_lines:
            _fetch[(cdiv(num_lines, LINES),)](host_B.view(torch.int64), device_B.view(torch.int64), num_lines, LINES=LINES)

    def deliver_(self, tokens_S: torch.Tensor, rows_S: torch.Tensor, last_tokens: torch.Tensor) -> torch.Tensor:
        assert tokens_S.is_contiguous() and rows_S.is_contiguous() and last_tokens.is_contiguous()
        host_S = torch.empty(tokens_S.shape, dtype=tokens_S.dtype, pin_memory=tokens_S.is_cuda)
        _deliver[(cdiv(len(tokens_S), ROWS),)](tokens_S, rows_S, last_tokens, host_S, len(tokens_S), ROWS=ROWS)
        return host_S
