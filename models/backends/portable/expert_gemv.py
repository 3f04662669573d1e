"""Triton kernels for a single token: its experts' matrices times vectors, with SwiGLU between and the residual behind. Called by `moe`.

As `gemv`: bound by memory, every weight of a chosen expert is read once, arithmetic is float32. Tiles are loaded in the shape in which they
are added up: Triton 3.6 gives wrong sums of a tile with three dimensions that was reshaped to two. Tests run all in Triton's interpreter.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.backends.portable.launch import early_launch, num_multiprocessors
from models.backends.portable.text import quantized, rounded_groups
from models.backends.portable.tuned import EXPERT_GEMV
from models.layers.fp8 import BLOCK, Weight


@triton.jit
def _product(factor: tl.tensor, value: tl.tensor, scales: tl.tensor, SCALED: tl.constexpr) -> tl.tensor:
    """(R,): factor (R, G, C) times value (G, C). If SCALED, `scales` (G,) are those of its groups of columns."""
    sums = tl.sum(factor.to(tl.float32) * value[None, :, :], 2)
    if SCALED:
        sums *= scales[None, :]
    return tl.sum(sums, 1)


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
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """The `index`-th ROWS rows of the chosen experts' gates and other factors, zeros of experts that are not ours and behind the last.

    With SCALES columns of scales, those of the rows' blocks.
    """
    PIECES: tl.constexpr = INNER // ROWS
    slot, group, row = index // PIECES, tl.arange(0, GROUPS), index % PIECES * ROWS + tl.arange(0, ROWS)
    column = group[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    expert = tl.where(slot < CHOSEN, tl.load(chosen + tl.minimum(slot, CHOSEN - 1)), -1)
    place = matrices + ((expert.to(tl.int64) * (2 * INNER) + row) * WIDTH)[:, None, None] + column[None, :, :]
    width = tl.where(expert < 0, 0, WIDTH)
    gate, up = tl.load(place, (column < width)[None, :, :], 0.0), tl.load(place + INNER * WIDTH, (column < width)[None, :, :], 0.0)
    gate_scales, up_scales = expert, expert
    if SCALES:
        place = scales + (expert * (2 * INNER // 128) + index % PIECES * ROWS // 128) * SCALES + group
        gate_scales = tl.load(place, group * 128 < width, 0.0)
        up_scales = tl.load(place + INNER // 128 * SCALES, group * 128 < width, 0.0)
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
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: every num_programs-th ROWS values of the chosen experts' SwiGLU. The next weights come while the last are multiplied."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    gate, up, gate_scales, up_scales = _fetch(
        matrices, scales, chosen, tl.program_id(0), CHOSEN, WIDTH, INNER, SCALES, ROWS, GROUPS, COLUMNS
    )  # fmt: skip
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    value = tl.load(x + column, column < WIDTH, 0.0).to(tl.float32)
    if SCALES:
        rounded, scale = rounded_groups(value)
        value = rounded.to(tl.float32) * scale[:, None]
    for index in range(tl.program_id(0), CHOSEN * (INNER // ROWS), tl.num_programs(0)):
        coming = _fetch(matrices, scales, chosen, index + tl.num_programs(0), CHOSEN, WIDTH, INNER, SCALES, ROWS, GROUPS, COLUMNS)
        result = _product(gate, value, gate_scales, SCALES > 0)
        result = result / (1 + tl.exp(-result)) * _product(up, value, up_scales, SCALES > 0)
        tl.store(inner + index * ROWS + tl.arange(0, ROWS), result.to(inner.dtype.element_ty))
        gate, up, gate_scales, up_scales = coming


@triton.jit
def _rows_of_choice(
    matrices: tl.tensor,
    chosen: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
) -> tl.tensor:
    """Rows of the K-th choice's matrix (R, G, C), zeros if its expert is not ours."""
    expert = tl.load(chosen + K)
    place = matrices + (expert.to(tl.int64) * WIDTH + row)[:, None, None] * INNER + column[None, :, :]
    return tl.load(place, (column < tl.where(expert < 0, 0, INNER))[None, :, :], 0.0)


@triton.jit
def _values_of_choice(
    inner: tl.tensor,
    inner_scales: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    scale_stride: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SCALES: tl.constexpr,
) -> tl.tensor:
    """The K-th choice's values (G, C) times all that they are to be multiplied by: zeros if its expert is not ours.

    The rows lie in one block of scales, and so do the C columns of each group.
    """
    expert, group = tl.load(chosen + K), tl.arange(0, column.shape[0])
    width = tl.where(expert < 0, 0, INNER)
    value = tl.load(inner + K * INNER + column, column < width, 0.0).to(tl.float32)
    weight = tl.where(expert < 0, 0.0, tl.load(weights + K).to(tl.float32))
    if SCALES:
        of_values = tl.load(inner_scales + group * scale_stride + K, group * 128 < width, 0.0)
        of_block = tl.load(scales + (expert * (WIDTH // 128) + tl.min(row, 0) // 128) * SCALES + group, group * 128 < width, 0.0)
        value *= (of_values * of_block * weight)[:, None]
    else:
        value *= weight
    return value


@triton.jit
def _down(
    inner: tl.tensor,
    inner_scales: tl.tensor,
    matrices: tl.tensor,
    scales: tl.tensor,
    chosen: tl.tensor,
    weights: tl.tensor,
    out: tl.tensor,
    scale_stride: tl.tensor,
    CHOSEN: tl.constexpr,
    WIDTH: tl.constexpr,
    INNER: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    AHEAD: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: ROWS of the WIDTH values that all chosen experts of ours give together, by the router's weights.

    The weights of AHEAD choices are under way while those of one are multiplied: the first before the kernel ahead, which alone writes
    `inner`, has ended.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, GROUPS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    fetched = ()
    for k in tl.static_range(AHEAD):
        fetched += (_rows_of_choice(matrices, chosen, row, column, k, WIDTH, INNER),)  # type: ignore[assignment]
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((ROWS, GROUPS, COLUMNS), tl.float32)
    for k in tl.static_range(CHOSEN):
        if k + AHEAD < CHOSEN:
            fetched += (_rows_of_choice(matrices, chosen, row, column, k + AHEAD, WIDTH, INNER),)  # type: ignore[assignment]
        value = _values_of_choice(
            inner, inner_scales, scales, chosen, weights, scale_stride, row, column, k, WIDTH, INNER, SCALES
        )  # fmt: skip
        total += fetched[k].to(tl.float32) * value[None, :, :]
    result = tl.sum(tl.sum(total, 2), 1)
    if ADD:
        result += tl.load(out + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


def expert_swiglu(x_1D: torch.Tensor, gate_up: Weight, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
    """See `moe.ExpertGemv`."""
    inner, width, chosen = len(gate_up) // num_experts // 2, gate_up.shape[1], len(chosen_K)
    inner_KI = x_1D.new_empty((chosen, inner))
    matrices, scales, num_scales = _operands(gate_up)
    tiles, block = EXPERT_GEMV[num_scales > 0], triton.next_power_of_2(width)
    rows, columns = math.gcd(inner, max(1, tiles.up_values // (2 * block))), BLOCK if num_scales else block
    assert x_1D.is_contiguous() and matrices.is_contiguous()
    _gate_up[(min(tiles.programs * num_multiprocessors(x_1D.device), chosen * inner // rows),)](
        x_1D, matrices, scales, chosen_K, inner_KI,
        CHOSEN=chosen, WIDTH=width, INNER=inner, SCALES=num_scales, ROWS=rows, GROUPS=block // columns, COLUMNS=columns,
        num_warps=tiles.up_warps, **early_launch(x_1D),
    )  # fmt: skip
    return inner_KI


def expert_sum(
    inner_KI: torch.Tensor, down: Weight, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
) -> None:
    """See `moe.ExpertGemv`."""
    (chosen, inner), width = inner_KI.shape, out_1D.shape[1]
    matrices, scales, num_scales = _operands(down)
    values, inner_scales, stride = inner_KI, inner_KI, 0
    if num_scales:
        rounded = quantized(inner_KI)
        values, inner_scales, stride = rounded.padded, rounded.scales, len(rounded.padded)
    tiles, block = EXPERT_GEMV[num_scales > 0], triton.next_power_of_2(inner)
    rows, columns = math.gcd(width, tiles.down_rows), BLOCK if num_scales else block
    assert values.is_contiguous() and matrices.is_contiguous() and out_1D.is_contiguous()
    _down[(width // rows,)](
        values, inner_scales, matrices, scales, chosen_K, weights_K, out_1D, stride,
        CHOSEN=chosen, WIDTH=width, INNER=inner, SCALES=num_scales, ROWS=rows, GROUPS=block // columns, COLUMNS=columns,
        AHEAD=min(chosen, tiles.down_ahead), ADD=adds, num_warps=tiles.down_warps, **early_launch(out_1D),
    )  # fmt: skip


def _operands(weight: Weight) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The matrices, their scales, and how many of these a row of blocks has: none if they are not float8."""
    if isinstance(weight, torch.Tensor):
        return weight, weight, 0
    return weight.values, weight.padded_scales, weight.padded_scales.shape[1]
