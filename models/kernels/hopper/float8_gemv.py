"""Float8 products of a single token, also with its experts, on `float8_gemv.cu`."""

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.triton.gemv import Norm
from models.weights.float8 import BlockScaled

MAX_CHOSEN = 12


def gemv(
    x_1K: torch.Tensor, weight: BlockScaled, out: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False,
    chosen_K: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """See `models.kernels.triton.gemv.gemv`; with `chosen_K`, by the matrix of each of these experts."""
    kernel, (norm_weight, eps) = load_kernel("float8_gemv", NO_HEADS), norm or (None, 0.0)
    kernel.run(x_1K, norm_weight, eps, weight.values.view(torch.uint8), weight.padded_scales, chosen_K, out, gated, adds)
    return out


def expert_swiglu(x_1D: torch.Tensor, gate_up: BlockScaled, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
    inner_KI = x_1D.new_empty((len(chosen_K), gate_up.shape[0] // num_experts // 2))
    return gemv(x_1D, gate_up, inner_KI, gated=True, chosen_K=chosen_K)


def expert_sum(
    inner_KI: torch.Tensor, down: BlockScaled, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
) -> None:
    kernel, values = load_kernel("float8_gemv", NO_HEADS), down.values.view(torch.uint8)
    kernel.run_sum(inner_KI, values, down.padded_scales, chosen_K, weights_K, out_1D, adds)
