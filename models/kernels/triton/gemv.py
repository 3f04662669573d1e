"""Triton kernel: matrix times a single token, with norm, SwiGLU and residual. Arithmetic is float32."""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.launch import await_previous_kernel, capability_of, cdiv, floats, kernel, num_multiprocessors
from models.kernels.triton.tuned import gemv_tiles

Norm = tuple[torch.Tensor, float]  # weight and eps of an RMSNorm


@triton.jit
def _fetch(place: tensor, row: tensor, column: tensor, OUT: constexpr, WIDTH: constexpr) -> tensor:
    """Load weights at `place`, zeros outside the (OUT, WIDTH) matrix."""
    return tl.load(place, (row < OUT)[:, None] & (column < WIDTH)[None, :], 0.0)


@triton.jit
def _norm(
    value: tensor, weight: tensor, normed: tensor, eps: tensor, column: tensor, WIDTH: constexpr, KEPT: constexpr,
) -> tensor:  # fmt: skip
    """Compute the RMSNorm of a vector. If KEPT, it is rounded, and one program stores it."""
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * floats(weight + column, column < WIDTH)
    if KEPT:
        kept = value.to(normed.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(normed + column, kept, column < WIDTH)
        value = kept.to(tl.float32)
    return value


@kernel()
def _gemv(
    x: tensor, norm_weight: tensor, weight: tensor, out: tensor, normed: tensor, eps: tensor, OUT: constexpr, WIDTH: constexpr,
    NORM: constexpr, KEPT: constexpr, GATED: constexpr, ADD: constexpr, OVERLAP: constexpr, ROWS: constexpr, BLOCK: constexpr,
    BLOCKS: constexpr,
) -> None:  # fmt: skip
    """One program: every num_programs-th group of ROWS values. The next weights are prefetched during a product, the first before the
    preceding kernel has finished: weights are constant."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
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
        value = _norm(value, norm_weight, normed, eps, column, WIDTH, KEPT)
    for _ in range(program * ROWS, OUT, step):
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
        result = tl.sum(total, 1)
        if GATED:
            result_up = tl.sum(up.to(tl.float32) * value[None, :], 1)
            result = result / (1 + tl.exp(-result)) * result_up
            up = next_up
        if ADD:
            result += floats(out + row, row < OUT)
        tl.store(out + row, result.to(out.dtype.element_ty), row < OUT)
        row += step


def gemv(
    x_1D: torch.Tensor,
    weight_ND: torch.Tensor,
    out_1N: torch.Tensor,
    norm: Norm | None = None,
    gated: bool = False,
    adds: bool = False,
    normed_1D: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write or add norm(x) @ weight.T to `out_1N`; if `gated`, silu(g) * u of its halves g and u. norm(x) is stored in `normed_1D`."""
    assert x_1D.is_contiguous() and weight_ND.is_contiguous() and out_1N.is_contiguous() and len(x_1D) == 1
    norm_weight, eps = norm or (x_1D, 0.0)
    width, num_out, is_whole = x_1D.shape[1], out_1N.shape[1], norm is not None or gated
    count = num_multiprocessors(x_1D.device)
    tiles = gemv_tiles(num_out, width, gated, is_whole, (capability_of(x_1D.device), count))
    assert width <= tiles.block or not is_whole
    _gemv[(min(tiles.programs * count, cdiv(num_out, tiles.rows)),)](
        x_1D, norm_weight, weight_ND, out_1N, x_1D if normed_1D is None else normed_1D, eps,
        OUT=num_out, WIDTH=width, NORM=norm is not None, KEPT=normed_1D is not None, GATED=gated, ADD=adds,
        ROWS=tiles.rows, BLOCK=tiles.block, BLOCKS=cdiv(width, tiles.block), num_warps=tiles.warps,
    )  # fmt: skip
    return out_1N
