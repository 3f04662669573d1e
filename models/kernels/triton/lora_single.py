"""Products of a single token with a bfloat16 matrix and an adapter: one kernel more than without. `_shrink_one` computes A @ x while the
previous kernel ends; `_adapted_gemv` is `gemv._gemv` whose results include B @ (A @ x)."""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.gemv import Norm, _fetch, _norm
from models.kernels.triton.launch import await_previous_kernel, capability_of, early_launch, floats, num_multiprocessors
from models.kernels.triton.tuned import gemv_tiles
from models.lora.low_rank import LowRank

WIDE = 8192  # inputs from which a program has more warps


@triton.jit
def _shrink_one(
    x: tensor, norm_weight: tensor, a: tensor, slots: tensor, ranks: tensor, out: tensor, eps: tensor, WIDTH: constexpr,
    GROUPS: constexpr, RANK: constexpr, NORM: constexpr, BLOCK: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (rank, group): a value of A @ norm(x), 0 beyond the rank or without an adapter."""
    rank, group, column = tl.program_id(0), tl.program_id(1), tl.arange(0, BLOCK)
    slot = tl.load(slots)
    safe = tl.maximum(slot, 0)
    width = tl.where((slot >= 0) & (rank < tl.load(ranks + safe * GROUPS + group)), WIDTH, 0)
    inside = column < width
    weights = floats(a + ((safe * GROUPS + group).to(tl.int64) * RANK + rank) * WIDTH + column, inside)
    await_previous_kernel(OVERLAP)
    value = floats(x + column, inside)
    if NORM:
        value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * floats(norm_weight + column, inside)
    tl.store(out + group * RANK + rank, tl.sum(weights * value, 0))


@triton.jit
def _low_rank_of(
    shrunk: tensor, b: tensor, ranks: tensor, groups: tensor, slot: tensor, row: tensor, OUT: constexpr, NUM_GROUPS: constexpr,
    RANK: constexpr, PADDED: constexpr,
) -> tensor:  # fmt: skip
    """Return rows of B @ shrunk."""
    inside, rank = row < OUT, tl.arange(0, PADDED)
    group = tl.load(groups + row, inside, 0)
    used = inside[:, None] & (rank[None, :] < tl.load(ranks + slot * NUM_GROUPS + group, inside, 0)[:, None])
    weights = floats(b + (slot.to(tl.int64) * OUT + row)[:, None] * RANK + rank[None, :], used)
    return tl.sum(weights * tl.load(shrunk + group[:, None] * RANK + rank[None, :], used, 0.0), 1)


@triton.jit
def _adapted_gemv(
    x: tensor, norm_weight: tensor, weight: tensor, out: tensor, shrunk: tensor, b: tensor, slots: tensor, ranks: tensor, groups: tensor,
    eps: tensor, OUT: constexpr, WIDTH: constexpr, NUM_GROUPS: constexpr, RANK: constexpr, PADDED: constexpr, NORM: constexpr,
    GATED: constexpr, ADD: constexpr, OVERLAP: constexpr, ROWS: constexpr, BLOCK: constexpr, BLOCKS: constexpr,
) -> None:  # fmt: skip
    """See `_gemv`; the low-rank part of a group of rows is loaded before its products, which hide the time."""
    column, row = tl.arange(0, BLOCK), tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.num_programs(0) * ROWS
    place = weight + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    gate = _fetch(place, row, column, OUT, WIDTH)
    up = gate
    if GATED:
        up = _fetch(place + OUT * WIDTH, row, column, OUT, WIDTH)
    slot, all_rows = tl.maximum(tl.load(slots), 0), OUT * (1 + GATED)
    await_previous_kernel(OVERLAP)
    value = floats(x + column, column < WIDTH)
    if NORM:
        value = _norm(value, norm_weight, x, eps, column, WIDTH, False)
    for _ in range(tl.program_id(0) * ROWS, OUT, step):
        low = _low_rank_of(shrunk, b, ranks, groups, slot, row, all_rows, NUM_GROUPS, RANK, PADDED)
        low_up = low
        if GATED:
            low_up = _low_rank_of(shrunk, b, ranks, groups, slot, row + OUT, all_rows, NUM_GROUPS, RANK, PADDED)
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
            if BLOCKS > 1:
                value = floats(x + first + column, first + column < WIDTH)
            gate = next_gate
        result = tl.sum(total, 1) + low
        if GATED:
            result = result / (1 + tl.exp(-result)) * (tl.sum(up.to(tl.float32) * value[None, :], 1) + low_up)
            up = next_up
        if ADD:
            result += floats(out + row, row < OUT)
        tl.store(out + row, result.to(out.dtype.element_ty), row < OUT)
        row += step


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
    num_out, is_whole, launch = out_1N.shape[1], norm is not None or gated, early_launch(x_1D)
    shrunk = torch.empty((groups, rank), dtype=torch.float32, device=x_1D.device)
    _shrink_one[(rank, groups)](
        x_1D, norm_weight, low_rank.a_SGRK, slots_1, low_rank.ranks_SG, shrunk, eps, WIDTH=width, GROUPS=groups, RANK=rank,
        NORM=norm is not None, BLOCK=triton.next_power_of_2(width), num_warps=8 if width >= WIDE else 4, **launch,
    )  # fmt: skip
    count = num_multiprocessors(x_1D.device)
    tiles = gemv_tiles(num_out, width, gated, is_whole, (capability_of(x_1D.device), count))
    assert width <= tiles.block or not is_whole
    _adapted_gemv[(min(tiles.programs * count, triton.cdiv(num_out, tiles.rows)),)](
        x_1D, norm_weight, weight_ND, out_1N, shrunk, low_rank.b_SNR, slots_1, low_rank.ranks_SG, low_rank.groups_N, eps,
        OUT=num_out, WIDTH=width, NUM_GROUPS=groups, RANK=rank, PADDED=triton.next_power_of_2(rank), NORM=norm is not None,
        GATED=gated, ADD=adds,
        ROWS=tiles.rows, BLOCK=tiles.block, BLOCKS=triton.cdiv(width, tiles.block), num_warps=tiles.warps, **launch,
    )  # fmt: skip
    return out_1N
