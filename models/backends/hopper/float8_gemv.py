"""`FewFloat8` on `float8_gemv.cu`."""

import torch

from models.backends.hopper.compile import NO_HEADS, load_kernel
from models.backends.portable.gemv import Norm
from models.backends.portable.launch import num_multiprocessors
from models.layers.fp8 import BlockScaled, GroupScaled, Weight

MAX_CHOSEN = 12
MAX_TOKENS = 4
FEW_BYTES = 100_000  # of a multiprocessor's shared memory, beside the weights: all tokens, and sums of its rows by each warp
ROW_BYTES = 1.6  # of these sums, for each row of the matrix


def gemv(
    x_1K: torch.Tensor, weight_NK: Weight, out_1N: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False
) -> torch.Tensor:
    return _run(x_1K, norm, weight_NK, _no_experts(x_1K), out_1N, gated, adds)


def expert_swiglu(x_1D: torch.Tensor, gate_up: Weight, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
    inner_KI = x_1D.new_empty((len(chosen_K), len(gate_up) // num_experts // 2))
    return _run(x_1D, None, gate_up, chosen_K, inner_KI, gated=True, adds=False)


def expert_sum(
    inner_KI: torch.Tensor, down: Weight, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
) -> None:
    assert isinstance(down, BlockScaled)
    kernel, values = load_kernel("float8_gemv", NO_HEADS), down.values.view(torch.uint8)
    kernel.run_sum(inner_KI, values, down.padded_scales, chosen_K, weights_K, out_1D, adds)


def takes(x_TK: GroupScaled, weight_NK: BlockScaled) -> bool:
    return len(x_TK) <= MAX_TOKENS and x_TK.values.numel() + ROW_BYTES * len(weight_NK) <= FEW_BYTES


def multiply_few(
    x_TK: GroupScaled, weight_NK: BlockScaled, out_TN: torch.Tensor, gated: bool = False, adds: bool = False
) -> torch.Tensor:
    kernel, count, units = load_kernel("float8_gemv", NO_HEADS), num_multiprocessors(out_TN.device), x_TK.scales.t()
    values, weights = (x.view(torch.uint8) for x in (x_TK.padded, weight_NK.values))
    kernel.run_few(values, units, weights, weight_NK.padded_scales, _no_experts(out_TN), out_TN, gated, adds, count)
    return out_TN


def _no_experts(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(0, dtype=torch.int32)


def _run(
    x: torch.Tensor, norm: Norm | None, weight: Weight, chosen: torch.Tensor, out: torch.Tensor, gated: bool, adds: bool
) -> torch.Tensor:
    assert isinstance(weight, BlockScaled)
    norm_weight, eps = norm or (x.new_empty(0), 0.0)
    kernel, values, count = load_kernel("float8_gemv", NO_HEADS), weight.values.view(torch.uint8), num_multiprocessors(x.device)
    kernel.run(x, norm_weight, eps, values, weight.padded_scales, chosen, out, gated, adds, count)
    return out
