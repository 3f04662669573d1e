"""GEMV for the bfloat16 matrices of a single token's experts."""

import math

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.launch import await_previous_kernel, floats, kernel, num_multiprocessors, power_of_2
from models.weights.plain import Plain

UP_VALUES, UP_WARPS, UP_PROGRAMS = 4096, 4, 8  # gate and up: weights per load, warps, programs per multiprocessor
DOWN_ROWS, DOWN_WARPS, DOWN_PREFETCH = 4, 2, 3  # down: rows per program, warps, choices whose weights are prefetched


@triton.jit
def _fetch(
    matrices: tensor, chosen: tensor, index: tensor, CHOSEN: constexpr, WIDTH: constexpr, INNER: constexpr, ROWS: constexpr,
    BLOCK: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Load the `index`-th ROWS rows of the chosen gate and up projections, zeros for experts of other ranks."""
    PIECES: tl.constexpr = INNER // ROWS
    slot, row, column = index // PIECES, index % PIECES * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    expert = tl.where(slot < CHOSEN, tl.load(chosen + tl.minimum(slot, CHOSEN - 1)), -1)
    place = matrices + ((expert.to(tl.int64) * (2 * INNER) + row) * WIDTH)[:, None] + column[None, :]
    inside = (column < tl.where(expert < 0, 0, WIDTH))[None, :]
    return tl.load(place, inside, 0.0), tl.load(place + INNER * WIDTH, inside, 0.0)


@kernel()
def _gate_up(
    x: tensor, matrices: tensor, chosen: tensor, inner: tensor, CHOSEN: constexpr, WIDTH: constexpr, INNER: constexpr, ROWS: constexpr,
    BLOCK: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: every num_programs-th group of ROWS values of the experts' SwiGLU."""
    await_previous_kernel(OVERLAP)
    gate, up = _fetch(matrices, chosen, tl.program_id(0), CHOSEN, WIDTH, INNER, ROWS, BLOCK)
    column = tl.arange(0, BLOCK)
    value = floats(x + column, column < WIDTH)[None, :]
    for index in range(tl.program_id(0), CHOSEN * (INNER // ROWS), tl.num_programs(0)):
        coming = _fetch(matrices, chosen, index + tl.num_programs(0), CHOSEN, WIDTH, INNER, ROWS, BLOCK)
        result = tl.sum(gate.to(tl.float32) * value, 1)
        result = result / (1 + tl.exp(-result)) * tl.sum(up.to(tl.float32) * value, 1)
        tl.store(inner + index * ROWS + tl.arange(0, ROWS), result.to(inner.dtype.element_ty))
        gate, up = coming


@triton.jit
def _rows_of_choice(
    matrices: tensor, chosen: tensor, row: tensor, column: tensor, K: constexpr, WIDTH: constexpr, INNER: constexpr,
) -> tensor:  # fmt: skip
    """Load rows of the K-th choice's matrix (R, C), zeros if its expert is on another rank."""
    expert = tl.load(chosen + K)
    place = matrices + (expert.to(tl.int64) * WIDTH + row)[:, None] * INNER + column[None, :]
    return tl.load(place, (column < tl.where(expert < 0, 0, INNER))[None, :], 0.0)


@kernel()
def _down(
    inner: tensor, matrices: tensor, chosen: tensor, weights: tensor, out: tensor, CHOSEN: constexpr, WIDTH: constexpr, INNER: constexpr,
    ROWS: constexpr, BLOCK: constexpr, PREFETCH: constexpr, ADD: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: ROWS of the WIDTH output values of this rank's chosen experts, weighted by the router. Weights of PREFETCH choices are
    prefetched, the first before the previous kernel, which writes `inner`, has finished."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    fetched = ()
    for k in tl.static_range(PREFETCH):
        fetched += (_rows_of_choice(matrices, chosen, row, column, k, WIDTH, INNER),)  # type: ignore[assignment]
    await_previous_kernel(OVERLAP)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.static_range(CHOSEN):
        if k + PREFETCH < CHOSEN:
            fetched += (_rows_of_choice(matrices, chosen, row, column, k + PREFETCH, WIDTH, INNER),)  # type: ignore[assignment]
        is_ours = tl.load(chosen + k) >= 0  # other values there are invalid
        value = floats(inner + k * INNER + column, column < tl.where(is_ours, INNER, 0))
        value *= tl.where(is_ours, tl.load(weights + k).to(tl.float32), 0.0)
        total += fetched[k].to(tl.float32) * value[None, :]
    result = tl.sum(total, 1)
    if ADD:
        result += tl.load(out + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


def expert_swiglu(x_1D: torch.Tensor, gate_up: Plain, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Implement `TritonProducts.expert_swiglu`."""
    matrices = gate_up.values
    inner, width, chosen = len(matrices) // num_experts // 2, matrices.shape[1], len(chosen_K)
    inner_KI, block = x_1D.new_empty((chosen, inner)), power_of_2(width)
    rows = math.gcd(inner, max(1, UP_VALUES // (2 * block)))
    assert x_1D.is_contiguous() and matrices.is_contiguous()
    _gate_up[(min(UP_PROGRAMS * num_multiprocessors(x_1D.device), chosen * inner // rows),)](
        x_1D, matrices, chosen_K, inner_KI,
        CHOSEN=chosen, WIDTH=width, INNER=inner, ROWS=rows, BLOCK=block, num_warps=UP_WARPS,
    )  # fmt: skip
    return inner_KI


def expert_sum(
    inner_KI: torch.Tensor, down: Plain, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
) -> None:
    """Implement `TritonProducts.expert_sum`."""
    (chosen, inner), width = inner_KI.shape, out_1D.shape[1]
    rows = math.gcd(width, DOWN_ROWS)
    assert inner_KI.is_contiguous() and down.values.is_contiguous() and out_1D.is_contiguous()
    _down[(width // rows,)](
        inner_KI, down.values, chosen_K, weights_K, out_1D,
        CHOSEN=chosen, WIDTH=width, INNER=inner, ROWS=rows, BLOCK=power_of_2(inner),
        PREFETCH=min(chosen, DOWN_PREFETCH), ADD=adds, num_warps=DOWN_WARPS,
    )  # fmt: skip
