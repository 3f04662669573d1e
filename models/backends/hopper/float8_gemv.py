"""Products of a single token with float8 matrices on a kernel of our own for Hopper, `float8_gemv.cu`. Made by `fp8`."""

from typing import Protocol

import torch

from models.backends.hopper.compile import NO_HEADS, load_kernel
from models.backends.portable.launch import num_multiprocessors
from models.layers.fp8 import BlockScaled, Weight

MAX_NORMED = 8192  # values of a token that is normalised
MAX_CHOSEN = 8  # experts of a token


class Kernel(Protocol):
    """What `float8_gemv.cu` exports. All tensors are without gaps; bytes of matrices are uint8."""

    def run(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weight: torch.Tensor,
        scales: torch.Tensor,
        chosen: torch.Tensor,
        out: torch.Tensor,
        is_gated: bool,
        adds: bool,
        num_multiprocessors: int,
    ) -> None:
        """out (1, N) of x (1, K) and weight (N, K), or (2 N, K) if it is gated; or (chosen, N) of as many rows for each expert.

        Without a norm and with a single matrix, `norm_weight` and `chosen` are empty.
        """

    def run_sum(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        chosen: torch.Tensor,
        shares: torch.Tensor,
        out: torch.Tensor,
        adds: bool,
    ) -> None:
        """out (1, N) of x (chosen, K) and weight (experts * N, K)."""


class Float8Gemv:
    """See `SingleFloat8`."""

    def __init__(self, device: torch.device) -> None:
        self._kernel: Kernel = load_kernel("float8_gemv", NO_HEADS)
        self._num_multiprocessors = num_multiprocessors(device)
        self._no_norm = torch.empty(0, dtype=torch.bfloat16, device=device)
        self._no_choice = torch.empty(0, dtype=torch.int32, device=device)

    def takes(self, weight: BlockScaled, is_normed: bool) -> bool:
        return not is_normed or weight.shape[1] <= MAX_NORMED

    def takes_experts(self, chosen: int) -> bool:
        return chosen <= MAX_CHOSEN

    def linear(
        self, x_1K: torch.Tensor, weight_NK: BlockScaled, norm: tuple[torch.Tensor, float] | None, out_1N: torch.Tensor | None = None
    ) -> torch.Tensor:
        out_1N = x_1K.new_empty((1, len(weight_NK))) if out_1N is None else out_1N
        return self._run(x_1K, norm, weight_NK, self._no_choice, out_1N, is_gated=False, adds=False)

    def swiglu(self, x_1K: torch.Tensor, weight_NK: BlockScaled, norm: tuple[torch.Tensor, float] | None) -> torch.Tensor:
        out_1I = x_1K.new_empty((1, len(weight_NK) // 2))
        return self._run(x_1K, norm, weight_NK, self._no_choice, out_1I, is_gated=True, adds=False)

    def add_(self, x_1K: torch.Tensor, weight_NK: BlockScaled, stream_1N: torch.Tensor) -> None:
        self._run(x_1K, None, weight_NK, self._no_choice, stream_1N, is_gated=False, adds=True)

    def expert_swiglu(self, x_1D: torch.Tensor, gate_up: Weight, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
        assert isinstance(gate_up, BlockScaled)
        inner_KI = x_1D.new_empty((len(chosen_K), len(gate_up) // num_experts // 2))
        return self._run(x_1D, None, gate_up, chosen_K, inner_KI, is_gated=True, adds=False)

    def expert_sum(
        self, inner_KI: torch.Tensor, down: Weight, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
    ) -> None:
        assert isinstance(down, BlockScaled)
        self._kernel.run_sum(inner_KI, down.values.view(torch.uint8), down.padded_scales, chosen_K, weights_K, out_1D, adds)

    def _run(
        self,
        x_1K: torch.Tensor,
        norm: tuple[torch.Tensor, float] | None,
        weight: BlockScaled,
        chosen: torch.Tensor,
        out: torch.Tensor,
        is_gated: bool,
        adds: bool,
    ) -> torch.Tensor:
        norm_weight, eps = norm or (self._no_norm, 0.0)
        values = weight.values.view(torch.uint8)
        self._kernel.run(x_1K, norm_weight, eps, values, weight.padded_scales, chosen, out, is_gated, adds, self._num_multiprocessors)
        return out
