"""Products of a single token with a bfloat16 matrix and an adapter, in one kernel: a few programs compute B @ (A @ x), and the others the
product, to which they add it. They wait for it at the end of their first rows, when it is usually there."""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.gemv import Norm, _fetch, _norm
from models.kernels.triton.launch import await_previous_kernel, capability_of, early_launch, floats, num_multiprocessors
from models.kernels.triton.tuned import gemv_tiles
from models.lora.low_rank import LowRank

PROGRAMS = 64  # with the low-rank product, at most one per multiprocessor: they wait for each other, so all must run at once
SHRINK_BLOCK = 4096  # inputs at once
EXPAND_ROWS = 64  # results at once


@triton.jit
def _position(ranks: tensor, slot: tensor, index: tensor, GROUPS: constexpr) -> tuple[tensor, tensor, tensor, tensor]:
    """Return group and rank of the `index`-th row of A, and the sum and the maximum of the groups' ranks, 0 for slot -1."""
    group, rank, total, most = slot * 0, index * 0, slot * 0, slot * 0
    for i in tl.static_range(GROUPS):
        count = tl.load(ranks + slot * GROUPS + i, slot >= 0, 0)
        is_inside = (index >= total) & (index < total + count)
        group, rank = tl.where(is_inside, i, group), tl.where(is_inside, index - total, rank)
        total, most = total + count, tl.maximum(most, count)
    return group, rank, total, most


@triton.jit
def _shrink_row(
    x: tensor, norm_weight: tensor, factors: tensor, eps: tensor, WIDTH: constexpr, NORM: constexpr, BLOCK: constexpr, BLOCKS: constexpr,
) -> tensor:  # fmt: skip
    """Return norm(x) times a row of A."""
    total, squares = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        column = block * BLOCK + tl.arange(0, BLOCK)
        factor, value = floats(factors + column, column < WIDTH), floats(x + column, column < WIDTH)
        if NORM:
            squares += value * value
            value *= floats(norm_weight + column, column < WIDTH)
        total += value * factor
    result = tl.sum(total, 0)
    if NORM:
        result *= tl.rsqrt(tl.sum(squares, 0) / WIDTH + eps)
    return result


@triton.jit
def _rows_of_b(b: tensor, slot: tensor, row: tensor, most: tensor, OUT: constexpr, RANK: constexpr, PADDED: constexpr) -> tensor:
    rank = tl.arange(0, PADDED)
    place = (slot.to(tl.int64) * OUT + row)[:, None] * RANK + rank[None, :]
    return tl.load(b + place, (row < OUT)[:, None] & (rank < most)[None, :], 0.0)


@triton.jit
def _low_rank(
    x: tensor, norm_weight: tensor, a: tensor, b: tensor, shrunk: tensor, out: tensor, arrived: tensor, slots: tensor, ranks: tensor,
    groups: tensor, eps: tensor, OUT: constexpr, WIDTH: constexpr, GROUPS: constexpr, RANK: constexpr, PADDED: constexpr, NORM: constexpr,
    PROGRAMS: constexpr, ROWS: constexpr, BLOCK: constexpr, BLOCKS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Store B @ (A @ norm(x)); each of the programs adds 1 to `arrived` after its rows of A, and again after its rows of B."""
    program, signed, rank = tl.program_id(0), tl.load(slots), tl.arange(0, PADDED)
    slot = tl.maximum(signed, 0)
    _, _, total, most = _position(ranks, signed, 0, GROUPS)
    row = program * ROWS + tl.arange(0, ROWS)
    rows = _rows_of_b(b, slot, row, most, OUT, RANK, PADDED)
    await_previous_kernel(OVERLAP)
    for index in range(program, total, PROGRAMS):
        group, place, _, _ = _position(ranks, signed, index, GROUPS)
        factors = a + ((slot * GROUPS + group).to(tl.int64) * RANK + place) * WIDTH
        tl.store(shrunk + group * RANK + place, _shrink_row(x, norm_weight, factors, eps, WIDTH, NORM, BLOCK, BLOCKS))
    tl.debug_barrier()
    seen = tl.atomic_add(arrived, 1, sem="acq_rel") + 1
    while seen < PROGRAMS:
        seen = tl.atomic_add(arrived, 0, sem="acquire")
    for _ in range(program * ROWS, OUT, PROGRAMS * ROWS):
        group = tl.load(groups + row, row < OUT, 0)
        used = rank[None, :] < tl.where(signed >= 0, tl.load(ranks + slot * GROUPS + group), 0)[:, None]
        values = tl.load(shrunk + group[:, None] * RANK + rank[None, :], used, 0.0)
        tl.store(out + row, tl.sum(tl.where(used, rows.to(tl.float32) * values, 0.0), 1), row < OUT)
        row += PROGRAMS * ROWS
        rows = _rows_of_b(b, slot, row, most, OUT, RANK, PADDED)
    tl.debug_barrier()
    tl.atomic_add(arrived, 1, sem="release")


@triton.jit
def _product(
    x: tensor, norm_weight: tensor, weight: tensor, out: tensor, low: tensor, arrived: tensor, eps: tensor, program: tensor,
    num_programs: tensor, OUT: constexpr, WIDTH: constexpr, NORM: constexpr, GATED: constexpr, ADD: constexpr, EXPECTED: constexpr,
    OVERLAP: constexpr, ROWS: constexpr, BLOCK: constexpr, BLOCKS: constexpr,
) -> None:  # fmt: skip
    """See `gemv._gemv`; `low` is added to products once `arrived` is EXPECTED."""
    column, row = tl.arange(0, BLOCK), program * ROWS + tl.arange(0, ROWS)
    step = num_programs * ROWS
    place = weight + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    gate = _fetch(place, row, column, OUT, WIDTH)
    up = gate
    if GATED:
        up = _fetch(place + OUT * WIDTH, row, column, OUT, WIDTH)
    await_previous_kernel(OVERLAP)
    value = floats(x + column, column < WIDTH)
    if NORM:
        value = _norm(value, norm_weight, x, eps, column, WIDTH, False)
    seen = program * 0
    for _ in range(program * ROWS, OUT, step):
        added = floats(low + row, row < tl.where(seen < EXPECTED, 0, OUT))
        added_up = added
        if GATED:
            added_up = floats(low + OUT + row, row < tl.where(seen < EXPECTED, 0, OUT))
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for block in tl.static_range(BLOCKS):
            first = ((block + 1) % BLOCKS) * BLOCK  # column of the next weights, possibly of the next group
            coming = row
            if block + 1 == BLOCKS:
                place += step.to(tl.int64) * WIDTH
                coming = row + step
            next_gate = _fetch(place + first, coming, first + column, OUT, WIDTH)
            next_up = next_gate
            if GATED:
                next_up = _fetch(place + OUT * WIDTH, coming, column, OUT, WIDTH)
            total += gate.to(tl.float32) * value[None, :]
            if block + 1 < BLOCKS:
                value = floats(x + first + column, first + column < WIDTH)
            gate = next_gate
        result = tl.sum(total, 1)
        result_up = result
        if GATED:
            result_up = tl.sum(up.to(tl.float32) * value[None, :], 1)
            up = next_up
        if seen < EXPECTED:
            while seen < EXPECTED:
                seen = tl.atomic_add(arrived, 0, sem="acquire")
            added = floats(low + row, row < OUT)
            if GATED:
                added_up = floats(low + OUT + row, row < OUT)
        if BLOCKS > 1:
            value = floats(x + column, column < WIDTH)
        result += added
        if GATED:
            result = result / (1 + tl.exp(-result)) * (result_up + added_up)
        if ADD:
            result += floats(out + row, row < OUT)
        tl.store(out + row, result.to(out.dtype.element_ty), row < OUT)
        row += step


@triton.jit
def _adapted_gemv(
    x: tensor, norm_weight: tensor, weight: tensor, out: tensor, a: tensor, b: tensor, shrunk: tensor, low: tensor, arrived: tensor,
    slots: tensor, ranks: tensor, groups: tensor, eps: tensor, OUT: constexpr, WIDTH: constexpr, GROUPS: constexpr, RANK: constexpr,
    PADDED: constexpr, NORM: constexpr, GATED: constexpr, ADD: constexpr, PROGRAMS: constexpr, LOW_ROWS: constexpr, LOW_BLOCK: constexpr,
    LOW_BLOCKS: constexpr, OVERLAP: constexpr, ROWS: constexpr, BLOCK: constexpr, BLOCKS: constexpr,
) -> None:  # fmt: skip
    """The first PROGRAMS programs start first, so no other keeps them from running while it waits for them."""
    if tl.program_id(0) < PROGRAMS:
        _low_rank(
            x, norm_weight, a, b, shrunk, low, arrived, slots, ranks, groups, eps, OUT * (1 + GATED), WIDTH, GROUPS, RANK, PADDED, NORM,
            PROGRAMS, LOW_ROWS, LOW_BLOCK, LOW_BLOCKS, OVERLAP,
        )  # fmt: skip
    else:
        _product(
            x, norm_weight, weight, out, low, arrived, eps, tl.program_id(0) - PROGRAMS, tl.num_programs(0) - PROGRAMS, OUT, WIDTH, NORM,
            GATED, ADD, 2 * PROGRAMS, OVERLAP, ROWS, BLOCK, BLOCKS,
        )  # fmt: skip


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
    num_out, is_whole, device = out_1N.shape[1], norm is not None or gated, x_1D.device
    count = num_multiprocessors(device)
    tiles = gemv_tiles(num_out, width, gated, is_whole, (capability_of(device), count))
    assert width <= tiles.block or not is_whole
    scratch = torch.empty(groups * rank + low_rank.b_SNR.shape[1], dtype=torch.float32, device=device)
    programs = min(PROGRAMS, count)
    _adapted_gemv[(programs + min(tiles.programs * count, triton.cdiv(num_out, tiles.rows)),)](
        x_1D, norm_weight, weight_ND, out_1N, low_rank.a_SGRK, low_rank.b_SNR, scratch, scratch[groups * rank :], low_rank.arrived_1,
        slots_1, low_rank.ranks_SG, low_rank.groups_N, eps, OUT=num_out, WIDTH=width, GROUPS=groups, RANK=rank,
        PADDED=triton.next_power_of_2(rank), NORM=norm is not None, GATED=gated, ADD=adds, PROGRAMS=programs, LOW_ROWS=EXPAND_ROWS,
        LOW_BLOCK=SHRINK_BLOCK, LOW_BLOCKS=triton.cdiv(width, SHRINK_BLOCK),
        ROWS=tiles.rows, BLOCK=tiles.block, BLOCKS=triton.cdiv(width, tiles.block), num_warps=tiles.warps, **early_launch(x_1D),
    )  # fmt: skip
    return out_1N
