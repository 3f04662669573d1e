"""Triton kernel for a single token: matrix times vector, with what comes before and behind it. Called by `hopper.ops`.

Bound by memory: every weight is read once. Arithmetic is float32. Tests run it in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.backends.portable.launch import early_launch, num_multiprocessors

GEMV_PROGRAMS = 4  # on each multiprocessor
GEMV_WARPS = 8
GEMV_ROWS = 4
GEMV_BLOCK = 4096  # values of a long vector at once
GEMV_MAX_BLOCK = 8192  # up to here a vector is kept whole


@triton.jit
def _fetch(place: tl.tensor, row: tl.tensor, column: tl.tensor, OUT: tl.constexpr, WIDTH: tl.constexpr) -> tl.tensor:
    """Weights at `place`, zeros outside the (OUT, WIDTH) matrix."""
    return tl.load(place, mask=(row < OUT)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _gemv(
    x: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    OVERLAP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """One program: every num_programs-th group of ROWS values of the result; the vector stays in registers if it is one block wide.

    The next weights are under way while the last ones are multiplied. With OVERLAP the program starts while the kernel before it still
    runs: it fetches its first weights, which nobody writes, and only then waits for the vector.
    """
    column = tl.arange(0, BLOCK)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    step = tl.num_programs(0) * ROWS
    place = weight + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    gate = _fetch(place, row, column, OUT, WIDTH)
    up = gate
    if GATED:
        up = _fetch(place + OUT * WIDTH, row, column, OUT, WIDTH)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    value = tl.load(x + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps)
        value = value * scale * tl.load(norm_weight + column, mask=column < WIDTH, other=0.0).to(tl.float32)
    for _ in range(tl.program_id(0) * ROWS, OUT, step):
        total = tl.zeros([ROWS, BLOCK], tl.float32)
        for block in tl.static_range(BLOCKS):
            first = ((block + 1) % BLOCKS) * BLOCK  # column of the weights that come next, which may be those of the next group
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
                value = tl.load(x + first + column, mask=first + column < WIDTH, other=0.0).to(tl.float32)
            gate = next_gate
        result = tl.sum(total, 1)
        if GATED:
            result = result / (1 + tl.exp(-result)) * tl.sum(up.to(tl.float32) * value[None, :], 1)
            up = next_up
        if ADD:
            result += tl.load(out + row, mask=row < OUT, other=0.0).to(tl.float32)
        tl.store(out + row, result.to(out.dtype.element_ty), mask=row < OUT)
        row += step


def gemv(
    x_1D: torch.Tensor,
    weight_ND: torch.Tensor,
    dtype: torch.dtype,
    norm: tuple[torch.Tensor, float] | None = None,
    out_1N: torch.Tensor | None = None,
) -> torch.Tensor:
    """norm(x) @ weight.T as `dtype` for one token, in `out_1N` if that is given; `norm` is (weight, eps) of an RMSNorm, or None."""
    if out_1N is None:
        out_1N = x_1D.new_empty((1, len(weight_ND)), dtype=dtype)
    _launch_gemv(x_1D, norm, weight_ND, out_1N, gated=False, add=False)
    return out_1N


def gemv_swiglu(x_1D: torch.Tensor, weight_ND: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
    """silu(g) * u for one token, where g and u are the halves of norm(x) @ weight.T."""
    out_1I = x_1D.new_empty((1, len(weight_ND) // 2))
    _launch_gemv(x_1D, norm, weight_ND, out_1I, gated=True, add=False)
    return out_1I


def gemv_add_(x_1D: torch.Tensor, weight_ND: torch.Tensor, residual_1N: torch.Tensor) -> None:
    """residual += x @ weight.T for one token."""
    _launch_gemv(x_1D, None, weight_ND, residual_1N, gated=False, add=True)


def _launch_gemv(
    x_1D: torch.Tensor, norm: tuple[torch.Tensor, float] | None, weight_ND: torch.Tensor, out_1N: torch.Tensor, gated: bool, add: bool
) -> None:
    assert x_1D.is_contiguous() and weight_ND.is_contiguous() and out_1N.is_contiguous() and len(x_1D) == 1
    norm_weight, eps = norm or (x_1D, 0.0)
    width, num_out = x_1D.shape[1], out_1N.shape[1]
    block = triton.next_power_of_2(width) if width <= GEMV_MAX_BLOCK else GEMV_BLOCK
    assert width <= block or (norm is None and not gated), "a norm and a gate need the whole vector at once"
    rows = 1 if gated else GEMV_ROWS
    _gemv[(min(GEMV_PROGRAMS * num_multiprocessors(x_1D.device), triton.cdiv(num_out, rows)),)](
        x_1D, norm_weight, weight_ND, out_1N, eps,
        OUT=num_out, WIDTH=width, NORM=norm is not None, GATED=gated, ADD=add,
        ROWS=rows, BLOCK=block, BLOCKS=triton.cdiv(width, block), num_warps=GEMV_WARPS, **early_launch(x_1D),
    )  # fmt: skip
