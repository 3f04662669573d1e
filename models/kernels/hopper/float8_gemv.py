"""Float8 products of a single token, also with its experts, on `float8_gemv.cu`."""

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.triton.gemv import Norm
from models.kernels.triton.launch import num_multiprocessors
from models.weights.float8 import BlockScaled

MAX_CHOSEN = 12


def gemv(
    x_1K: torch.Tensor, weight_NK: BlockScaled, out_1N: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False
) -> torch.Tensor:
    return _run(x_1K, norm, weight_NK, x_1K.new_empty(0, dtype=torch.int32), out_1N, gated, adds)


def expert_swiglu(x_1D: torch.Tensor, gate_up: BlockScaled, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
    inner_KI = x_1D.new_empty((len(chosen_K), gate_up.shape[0] // num_experts // 2))
    return _run(x_1D, None, gate_up, chosen_K, inner_KI, gated=True, adds=False)


def expert_sum(
    inner_KI: torch.Tensor, down: BlockScaled, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
) -> None:
    kernel, values = load_kernel("float8_gemv", NO_HEADS), down.values.view(torch.uint8)
    kernel.run_sum(inner_KI, values, down.padded_scales, chosen_K, weights_K, out_1D, adds)


def _run(
    x: torch.Tensor, norm: Norm | None, weight: BlockScaled, chosen: torch.Tensor, out: torch.Tensor, gated: bool, adds: bool
) -> torch.Tensor:
    norm_weight, eps = norm or (x.new_empty(0), 0.0)
    kernel, values, count = load_kernel("float8_gemv", NO_HEADS), weight.values.view(torch.uint8), num_multiprocessors(x.device)
    kernel.run(x, norm_weight, eps, values, weight.padded_scales, chosen, out, gated, adds, count)
    return out
