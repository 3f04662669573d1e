"""Triton kernels for a single token: its experts' matrices times vectors, with SwiGLU between and the residual behind. Called by `moe`.

As `gemv`: bound by memory, every weight of a chosen expert is read once, arithmetic is float32. Vectors for float8 matrices are rounded to
float8 by every program anew, which takes less time than a kernel of its own. Tests run all in Triton's interpreter.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.backends.portable.launch import early_launch, num_multiprocessors
from models.backends.portable.text import rounded_groups
from models.backends.portable.tuned import EXPERT_GEMV
from models.layers.fp8 import Weight


@triton.jit
def _as_rounded(value: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """What float8 makes of BLOCK values, for a float8 matrix."""
    rounded, scale = rounded_groups(tl.reshape(value, (BLOCK // 128, 128)))
    return tl.reshape(rounded.to(tl.float32) * scale[:, None], (BLOCK,))


@triton.jit
def _product(
    factor: tl.tensor, value: tl.tensor, scales: tl.tensor, SCALED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """(ROWS,): factor (ROWS, BLOCK) times the vector. If SCALED, `scales` (BLOCK / 128,) are those of its blocks."""
    products = factor.to(tl.float32) * value[None, :]
    if SCALED:
        return tl.sum(tl.sum(tl.reshape(products, (ROWS, BLOCK // 128, 128)), 2) * scales[None, :], 1)
    else:
        return tl.sum(products, 1)


@triton.jit
def _fetch(
    matrices: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    index: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The `index`-th ROWS rows of the chosen experts' gates and other factors, zeros of experts that are not ours and behind the last.

    With SCALES columns of scales, those of the rows' blocks.
    """
    GROUPS: tl.constexpr = INNER // ROWS
    slot, column, row = index // GROUPS, tl.arange(0, BLOCK), index % GROUPS * ROWS + tl.arange(0, ROWS)
    expert = tl.where(slot < CHOSEN, tl.load(chosen + tl.minimum(slot, CHOSEN - 1)), -1)
    place = matrices + (expert.to(tl.int64) * (2 * INNER) + row)[:, None] * WIDTH + column[None, :]
    inside = (column < tl.where(expert < 0, 0, WIDTH))[None, :]
    gate, up = tl.load(place, inside, 0.0), tl.load(place + INNER * WIDTH, inside, 0.0)
    gate_scales, up_scales = expert, expert
    if SCALES:
        block = tl.arange(0, BLOCK // 128)
        place = scales + (expert * (2 * INNER // 128) + index % GROUPS * ROWS // 128) * SCALES + block
        inside = block < tl.where(expert < 0, 0, WIDTH // 128)
        gate_scales, up_scales = tl.load(place, inside, 0.0), tl.load(place + INNER // 128 * SCALES, inside, 0.0)
    return gate, up, gate_scales, up_scales


@triton.jit
def _gate_up(
    x: tl.tensor,
    matrices: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    inner: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: every num_programs-th ROWS values of the chosen experts' SwiGLU. The next weights come while the last are multiplied."""
    if OVERLAP:
        gdc_wait()
    gate, up, gate_scales, up_scales = _fetch(
        matrices, scales, chosen, tl.program_id(0), CHOSEN, WIDTH, INNER, SCALES, ROWS, BLOCK
    )  # fmt: skip
    value = tl.load(x + tl.arange(0, BLOCK), tl.arange(0, BLOCK) < WIDTH, 0.0).to(tl.float32)
    if SCALES:
        value = _as_rounded(value, BLOCK)
    for index in range(tl.program_id(0), CHOSEN * (INNER // ROWS), tl.num_programs(0)):
        coming = _fetch(matrices, scales, chosen, index + tl.num_programs(0), CHOSEN, WIDTH, INNER, SCALES, ROWS, BLOCK)
        result = _product(gate, value, gate_scales, SCALES > 0, ROWS, BLOCK)
        result = result / (1 + tl.exp(-result)) * _product(up, value, up_scales, SCALES > 0, ROWS, BLOCK)
        tl.store(inner + index * ROWS + tl.arange(0, ROWS), result.to(inner.dtype.element_ty))
        gate, up, gate_scales, up_scales = coming


@triton.jit
def _down(
    inner: tl.tensor,
    matrices: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: ROWS of the WIDTH values that all chosen experts of ours give together, by the router's weights."""
    ALL: tl.constexpr = CHOICES * BLOCK
    slot, column, row = tl.arange(0, CHOICES), tl.arange(0, BLOCK), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen + slot, slot < CHOSEN, -1)
    inside = (expert >= 0)[:, None] & (column < INNER)[None, :]
    first = (expert.to(tl.int64) * WIDTH)[None, :, None] + row[:, None, None]
    factor = tl.load(matrices + first * INNER + column[None, None, :], inside[None, :, :], 0.0)
    share = tl.load(weights + slot, expert >= 0, 0.0).to(tl.float32)
    value = tl.load(inner + slot[:, None] * INNER + column[None, :], inside, 0.0).to(tl.float32)
    block_scales = expert
    if SCALES:
        block = tl.arange(0, BLOCK // 128)
        place = scales + (expert * (WIDTH // 128) + tl.program_id(0) * ROWS // 128)[:, None] * SCALES + block[None, :]
        block_scales = tl.reshape(tl.load(place, (expert >= 0)[:, None] & (block < INNER // 128)[None, :], 0.0), (ALL // 128,))
        value = tl.reshape(_as_rounded(tl.reshape(value, (ALL,)), ALL), (CHOICES, BLOCK))
    total = _product(tl.reshape(factor, (ROWS, ALL)), tl.reshape(value * share[:, None], (ALL,)), block_scales, SCALES > 0, ROWS, ALL)
    if ADD:
        total += tl.load(out + row).to(tl.float32)
    tl.store(out + row, total.to(out.dtype.element_ty))


def expert_swiglu(x_1D: torch.Tensor, gate_up: Weight, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
    """(K, I): silu(gate) * up of a token's chosen experts, by rows of `gate_up` as `Experts` says. What lies at a choice of -1 is void."""
    inner, width, chosen = len(gate_up) // num_experts // 2, gate_up.shape[1], len(chosen_K)
    inner_KI = x_1D.new_empty((chosen, inner))
    matrices, scales, num_scales = _operands(gate_up)
    tiles, block = EXPERT_GEMV[num_scales > 0], triton.next_power_of_2(width)
    rows = math.gcd(inner, max(1, tiles.up_values // (2 * block)))
    assert x_1D.is_contiguous() and matrices.is_contiguous()
    _gate_up[(min(tiles.programs * num_multiprocessors(x_1D.device), chosen * inner // rows),)](
        x_1D, matrices, scales, chosen_K, inner_KI,
        CHOSEN=chosen, WIDTH=width, INNER=inner, SCALES=num_scales, ROWS=rows, BLOCK=block, num_warps=tiles.up_warps, **early_launch(x_1D),
    )  # fmt: skip
    return inner_KI


def expert_sum(
    inner_KI: torch.Tensor, down: Weight, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
) -> None:
    """Into `out_1D`, or added to it: the sum of weight * down @ inner over the choices that are not -1."""
    (chosen, inner), width = inner_KI.shape, out_1D.shape[1]
    matrices, scales, num_scales = _operands(down)
    tiles, block, choices = EXPERT_GEMV[num_scales > 0], triton.next_power_of_2(inner), triton.next_power_of_2(chosen)
    rows = math.gcd(width, max(1, tiles.down_values // (choices * block)))
    assert inner_KI.is_contiguous() and matrices.is_contiguous() and out_1D.is_contiguous()
    _down[(width // rows,)](
        inner_KI, matrices, scales, chosen_K, weights_K, out_1D,
        CHOSEN=chosen, CHOICES=choices, WIDTH=width, INNER=inner, SCALES=num_scales, ROWS=rows, BLOCK=block, ADD=adds,
        num_warps=tiles.down_warps, **early_launch(out_1D),
    )  # fmt: skip


def _operands(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The matrices, their scales, and how many of these a row of blocks has: none if they are not float8."""
    if isinstance(weight, torch.Tensor):
        return weight, weight, 0
    return weight.values, weight.padded_scales, weight.padded_scales.shape[1]
