"""Triton kernels for a single token: its experts' matrices times vectors, with SwiGLU between and the residual behind. Called by `moe`.

As `gemv`: bound by memory, every weight of a chosen expert is read once, arithmetic is float32. Tests run them in Triton's interpreter.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.backends.portable.launch import early_launch, num_multiprocessors
from models.backends.portable.tuned import EXPERT_GEMV


@triton.jit
def _fetch(
    matrices: tl.tensor,
    chosen: tl.tensor,
    index: tl.tensor,
    column: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The `index`-th ROWS rows of the chosen experts' gates and other factors, zeros of experts that are not ours and behind the last."""
    GROUPS: tl.constexpr = INNER // ROWS
    slot, row = index // GROUPS, index % GROUPS * ROWS + tl.arange(0, ROWS)
    expert = tl.where(slot < CHOSEN, tl.load(chosen + tl.minimum(slot, CHOSEN - 1)), -1)
    place = matrices + (expert.to(tl.int64) * (2 * INNER) + row)[:, None] * WIDTH + column[None, :]
    inside = (column < tl.where(expert < 0, 0, WIDTH))[None, :]
    return tl.load(place, inside, 0.0), tl.load(place + INNER * WIDTH, inside, 0.0)


@triton.jit
def _gate_up(
    x: tl.tensor,
    matrices: tl.tensor,
    chosen: tl.tensor,
    inner: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: every num_programs-th ROWS values of the chosen experts' SwiGLU. The next weights come while the last are multiplied."""
    column = tl.arange(0, BLOCK)
    if OVERLAP:
        gdc_wait()
    gate, up = _fetch(matrices, chosen, tl.program_id(0), column, CHOSEN, WIDTH, INNER, ROWS)
    value = tl.load(x + column, column < WIDTH, 0.0).to(tl.float32)
    for index in range(tl.program_id(0), CHOSEN * (INNER // ROWS), tl.num_programs(0)):
        coming = _fetch(matrices, chosen, index + tl.num_programs(0), column, CHOSEN, WIDTH, INNER, ROWS)
        result = tl.sum(gate.to(tl.float32) * value[None, :], 1)
        result = result / (1 + tl.exp(-result)) * tl.sum(up.to(tl.float32) * value[None, :], 1)
        tl.store(inner + index * ROWS + tl.arange(0, ROWS), result.to(inner.dtype.element_ty))
        gate, up = coming


@triton.jit
def _down(
    inner: tl.tensor,
    matrices: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: ROWS of the WIDTH values that all chosen experts of ours give together, by the router's weights."""
    slot, column, row = tl.arange(0, CHOICES), tl.arange(0, BLOCK), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen + slot, slot < CHOSEN, -1)
    inside = (expert >= 0)[:, None] & (column < INNER)[None, :]
    first = (expert.to(tl.int64) * WIDTH)[None, :, None] + row[:, None, None]
    factor = tl.load(matrices + first * INNER + column[None, None, :], inside[None, :, :], 0.0)
    share = tl.load(weights + slot, expert >= 0, 0.0).to(tl.float32)
    value = tl.load(inner + slot[:, None] * INNER + column[None, :], inside, 0.0).to(tl.float32) * share[:, None]
    total = tl.sum(tl.sum(factor.to(tl.float32) * value[None, :, :], 2), 1)
    if ADD:
        total += tl.load(out + row).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty))


def expert_swiglu(x_1D: torch.Tensor, gate_up: torch.Tensor, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(K, I): silu(gate) * up of a token's chosen experts, by rows of `gate_up` as `Experts` says. What lies at a choice of -1 is void."""
    inner, width, chosen = len(gate_up) // num_experts // 2, gate_up.shape[1], len(chosen_K)
    inner_KI = x_1D.new_empty((chosen, inner))
    block = triton.next_power_of_2(width)
    rows = math.gcd(inner, max(1, EXPERT_GEMV.up_values // (2 * block)))
    assert x_1D.is_contiguous() and gate_up.is_contiguous()
    _gate_up[(min(EXPERT_GEMV.programs * num_multiprocessors(x_1D.device), chosen * inner // rows),)](
        x_1D, gate_up, chosen_K, inner_KI,
        CHOSEN=chosen, WIDTH=width, INNER=inner, ROWS=rows, BLOCK=block, num_warps=EXPERT_GEMV.warps, **early_launch(x_1D),
    )  # fmt: skip
    return inner_KI


def expert_sum(
    inner_KI: torch.Tensor, down: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
) -> None:
    """Into `out_1D`, or added to it: the sum of weight * down @ inner over the choices that are not -1."""
    (chosen, inner), width = inner_KI.shape, out_1D.shape[1]
    block, choices = triton.next_power_of_2(inner), triton.next_power_of_2(chosen)
    rows = math.gcd(width, max(1, EXPERT_GEMV.down_values // (choices * block)))
    assert inner_KI.is_contiguous() and down.is_contiguous() and out_1D.is_contiguous()
    _down[(width // rows,)](
        inner_KI, down, chosen_K, weights_K, out_1D,
        CHOSEN=chosen, CHOICES=choices, WIDTH=width, INNER=inner, ROWS=rows, BLOCK=block, ADD=adds,
        num_warps=EXPERT_GEMV.warps, **early_launch(out_1D),
    )  # fmt: skip
