"""Products of a single token with a bfloat16 matrix and an adapter, in one kernel: a few programs compute A @ x; the others compute rows
of the product, and at their end, when A @ x is usually there, they add B @ (A @ x)."""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.gemv import Norm, multiply_rows
from models.kernels.triton.launch import await_previous_kernel, capability_of, cdiv, floats, kernel, num_multiprocessors, power_of_2
from models.kernels.triton.tuned import gemv_tiles
from models.lora import low_rank as low_rank_module
from models.lora.low_rank import LowRank

PENDING = tl.constexpr(low_rank_module.PENDING)
MOST_LAST_ROWS = 32  # to which a program adds B @ (A @ x) at once
GATED_ROWS = 2  # times the rows of `gemv` per iteration
GATED_PROGRAMS, PROGRAMS = 4, 2  # per multiprocessor


@triton.jit
def _position(ranks: tensor, slot: tensor, index: tensor, GROUPS: constexpr) -> tuple[tensor, tensor, tensor]:
    """Return group and rank of the `index`-th row of A, and the number of all rows, 0 for slot -1."""
    group, rank, total = slot * 0, index * 0, slot * 0
    for i in tl.static_range(GROUPS):
        count = tl.load(ranks + slot * GROUPS + i, slot >= 0, 0)
        is_inside = (index >= total) & (index < total + count)
        group, rank, total = tl.where(is_inside, i, group), tl.where(is_inside, index - total, rank), total + count
    return group, rank, total


@triton.jit
def _shrink_rows(
    x: tensor, norm_weight: tensor, a: tensor, shrunk: tensor, ranks: tensor, slot: tensor, eps: tensor, WIDTH: constexpr,
    GROUPS: constexpr, RANK: constexpr, NORM: constexpr, PROGRAMS: constexpr, BLOCK: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Store every PROGRAMS-th value of A @ norm(x), which is no `PENDING`."""
    column, index = tl.arange(0, BLOCK), tl.program_id(0)
    group, rank, total = _position(ranks, slot, index, GROUPS)
    factors = a + ((tl.maximum(slot, 0) * GROUPS + group).to(tl.int64) * RANK + rank) * WIDTH + column
    row = tl.load(factors, column < tl.where(index < total, WIDTH, 0), 0.0)
    await_previous_kernel(OVERLAP)
    value = floats(x + column, column < WIDTH)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * floats(norm_weight + column, column < WIDTH)
    for index in range(tl.program_id(0), total, PROGRAMS):
        result = tl.sum(row.to(tl.float32) * value, 0)
        tl.store(shrunk + group * RANK + rank, tl.where(result == result, result, float("nan")).to(tl.int32, bitcast=True))
        group, rank, _ = _position(ranks, slot, index + PROGRAMS, GROUPS)
        factors = a + ((slot * GROUPS + group).to(tl.int64) * RANK + rank) * WIDTH + column
        row = tl.load(factors, column < tl.where(index + PROGRAMS < total, WIDTH, 0), 0.0)


@triton.jit
def _expand(
    b: tensor, shrunk: tensor, slot: tensor, row: tensor, group: tensor, count: tensor, OUT: constexpr, RANK: constexpr, PADDED: constexpr,
) -> tensor:  # fmt: skip
    """Return rows of B times `shrunk`, once its values have been stored."""
    rank = tl.arange(0, PADDED)
    used, place = rank[None, :] < count[:, None], group[:, None] * RANK + rank[None, :]
    rows = tl.load(b + (slot.to(tl.int64) * OUT + row)[:, None] * RANK + rank[None, :], used, 0.0)
    found = tl.load(shrunk + place, used, 0, volatile=True)
    while tl.max(tl.max((found == PENDING).to(tl.int32), 1), 0) > 0:
        found = tl.load(shrunk + place, used, 0, volatile=True)
    return tl.sum(rows.to(tl.float32) * found.to(tl.float32, bitcast=True), 1)


@triton.jit
def _group_of(groups: tensor, ranks: tensor, slot: tensor, row: tensor, inside: tensor, GROUPS: constexpr) -> tuple[tensor, tensor]:
    """Return groups of rows, and their ranks."""
    group = tl.load(groups + row, inside, 0)
    return group, tl.where(slot < 0, 0, tl.load(ranks + tl.maximum(slot, 0) * GROUPS + group, inside, 0))


@kernel()
def _adapted_gemv(
    x: tensor, norm_weight: tensor, weight: tensor, out: tensor, a: tensor, b: tensor, shrunk: tensor, raw: tensor, slots: tensor,
    ranks: tensor, groups: tensor, eps: tensor, OUT: constexpr, WIDTH: constexpr, GROUPS: constexpr, RANK: constexpr, PADDED: constexpr,
    NORM: constexpr, GATED: constexpr, ADD: constexpr, SHRINKING: constexpr, SHRINK_BLOCK: constexpr, OVERLAP: constexpr,
    ROWS: constexpr, BLOCK: constexpr, BLOCKS: constexpr, LAST_ROWS: constexpr,
) -> None:  # fmt: skip
    """The first SHRINKING programs, which start first, compute A @ x; no other keeps them from running while it waits for them."""
    slot = tl.load(slots)
    if tl.program_id(0) < SHRINKING:
        _shrink_rows(x, norm_weight, a, shrunk, ranks, slot, eps, WIDTH, GROUPS, RANK, NORM, SHRINKING, SHRINK_BLOCK, OVERLAP)
    else:
        program, num_programs, index = tl.program_id(0) - SHRINKING, tl.num_programs(0) - SHRINKING, tl.arange(0, LAST_ROWS)
        row = (program + index // ROWS * num_programs) * ROWS + index % ROWS  # those of `multiply_rows`
        group, count = _group_of(groups, ranks, slot, row, row < OUT, GROUPS)
        group_up, count_up = group, count
        if GATED:
            group_up, count_up = _group_of(groups, ranks, slot, row + OUT, row < OUT, GROUPS)
        multiply_rows(
            x, norm_weight, weight, raw, raw, eps, program, num_programs, OUT, WIDTH, NORM, False, GATED, True, False, OVERLAP, ROWS,
            BLOCK, BLOCKS,
        )  # fmt: skip
        tl.debug_barrier()
        for _ in range(program * ROWS, OUT, LAST_ROWS // ROWS * num_programs * ROWS):
            result = floats(raw + row, row < OUT)
            if ADD:
                result += floats(out + row, row < OUT)
            result += _expand(b, shrunk, slot, row, group, count, OUT * (1 + GATED), RANK, PADDED)
            if GATED:
                low_up = _expand(b, shrunk, slot, row + OUT, group_up, count_up, OUT * (1 + GATED), RANK, PADDED)
                result = result / (1 + tl.exp(-result)) * (floats(raw + OUT + row, row < OUT) + low_up)
            tl.store(out + row, result.to(out.dtype.element_ty), row < OUT)
            row += LAST_ROWS // ROWS * num_programs * ROWS
            group, count = _group_of(groups, ranks, slot, row, row < OUT, GROUPS)
            if GATED:
                group_up, count_up = _group_of(groups, ranks, slot, row + OUT, row < OUT, GROUPS)


def adapted_gemv(
    x_1D: torch.Tensor,
    weight_ND: torch.Tensor,
    out_1N: torch.Tensor,
    low_rank: LowRank,
    slots_1: torch.Tensor,
    norm: Norm | None = None,
    gated: bool = False,
    adds: bool = False,
) -> torch.Tensor:
    """Compute `gemv.gemv` with the adapter of the token's slot."""
    assert x_1D.is_contiguous() and weight_ND.is_contiguous() and out_1N.is_contiguous() and len(x_1D) == len(slots_1) == 1
    norm_weight, eps = norm or (x_1D, 0.0)
    _, groups, rank, width = low_rank.a_SGRK.shape
    num_out, is_whole, count = out_1N.shape[1], norm is not None or gated, num_multiprocessors(x_1D.device)
    tiles = gemv_tiles(num_out, width, gated, is_whole, (capability_of(x_1D.device), count))
    tiles = replace(tiles, rows=tiles.rows * GATED_ROWS, programs=GATED_PROGRAMS) if gated else replace(tiles, programs=PROGRAMS)
    assert width <= tiles.block or not is_whole
    shrinking, programs = min(count, groups * rank), min(tiles.programs * count, cdiv(num_out, tiles.rows))
    raw_N = x_1D.new_empty(len(weight_ND), dtype=torch.float32)
    _adapted_gemv[(shrinking + programs,)](
        x_1D, norm_weight, weight_ND, out_1N, low_rank.a_SGRK, low_rank.b_SNR, low_rank.shrunk_GR, raw_N, slots_1,
        low_rank.ranks_SG, low_rank.groups_N, eps, OUT=num_out, WIDTH=width, GROUPS=groups, RANK=rank,
        PADDED=power_of_2(rank), NORM=norm is not None, GATED=gated, ADD=adds, SHRINKING=shrinking,
        SHRINK_BLOCK=power_of_2(width), ROWS=tiles.rows, BLOCK=tiles.block, BLOCKS=cdiv(width, tiles.block),
        LAST_ROWS=min(MOST_LAST_ROWS, power_of_2(cdiv(num_out, tiles.rows * programs) * tiles.rows)),
        num_warps=tiles.warps,
    )  # fmt: skip
    return out_1N
