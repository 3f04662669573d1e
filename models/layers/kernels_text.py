"""Triton kernels of the decoder: norm; SwiGLU; q/k norm, rotation and KV write in one pass; matrix times vector. Called by `ops_cuda`.

All are bound by memory: every value is read once and written once. Arithmetic is float32. Tests run them in Triton's interpreter.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.layers.ops import KVPool

MAX_HEADS_PER_PROGRAM = 8
NORM_WARPS = 8
SWIGLU_BLOCK = 1024
GEMV_PROGRAMS = 4  # on each multiprocessor
GEMV_WARPS = 8
GEMV_ROWS = 4
GEMV_BLOCK = 4096  # values of a long vector at once
GEMV_MAX_BLOCK = 8192  # up to here a vector is kept whole


@triton.jit
def _rms_norm(
    x: tl.tensor,
    weight: tl.tensor,
    addends: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    addend_size: tl.tensor,
    ADDENDS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: one token, to which ADDENDS values are added first. With OVERLAP it starts while the kernel before it ends."""
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + column
    scale = tl.load(weight + column, inside, 0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()
    value = tl.load(x + place, inside, 0.0).to(tl.float32)
    if ADDENDS > 0:
        for part in tl.static_range(ADDENDS):
            value += tl.load(addends + part * addend_size + place, inside, 0.0).to(tl.float32)
        whole = value.to(x.dtype.element_ty)
        tl.store(x + place, whole, inside)
        value = whole.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * scale
    tl.store(out + place, value.to(out.dtype.element_ty), inside)


@triton.jit
def _swiglu(gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr) -> None:
    """One program: BLOCK values of one token. With OVERLAP it starts while the kernel before it ends."""
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    column = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    if OVERLAP:
        gdc_wait()
    gate = tl.load(gate_up + token * (2 * WIDTH) + column, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + token * (2 * WIDTH) + WIDTH + column, inside, 0.0).to(tl.float32)
    tl.store(out + token * WIDTH + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), inside)


@triton.jit(do_not_specialize_on_alignment=["slots"])  # a slice of a staging buffer: must not compile anew
def _norm_rope_store(
    qkv: tl.tensor,
    q_out: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    slots: tl.tensor,
    cos_sin: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """One program: one token, GROUP neighbouring heads, which are all queries, all keys or all values.

    With OVERLAP it starts while the kernel before it ends, and lets the attention behind it do so.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * GROUP
    heads = first + tl.arange(0, GROUP)[:, None]
    pairs = tl.arange(0, HALF)[None, :]
    source = qkv + (token * (HEADS + 2 * KV_HEADS) + heads) * (2 * HALF) + pairs
    lower = tl.load(source).to(tl.float32)
    upper = tl.load(source + HALF).to(tl.float32)
    if first < HEADS + KV_HEADS:
        weight = tl.where(first < HEADS, q_weight, k_weight)
        scale = tl.rsqrt((tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1)) / (2 * HALF) + eps)[:, None]
        lower = lower * scale * tl.load(weight + pairs).to(tl.float32)
        upper = upper * scale * tl.load(weight + HALF + pairs).to(tl.float32)
        cos = tl.load(cos_sin + token * (2 * HALF) + pairs)
        sin = tl.load(cos_sin + token * (2 * HALF) + HALF + pairs)
        lower, upper = lower * cos - upper * sin, upper * cos + lower * sin
    slot = tl.load(slots + token)
    target = q_out + (token * HEADS + heads) * (2 * HALF) + pairs
    if first >= HEADS:
        target = k_pool + (slot * KV_HEADS + heads - HEADS) * (2 * HALF) + pairs
    if first >= HEADS + KV_HEADS:
        lower = tl.where(tl.abs(lower) < float("inf"), lower, 0.0)
        upper = tl.where(tl.abs(upper) < float("inf"), upper, 0.0)
        target = v_pool + (slot * KV_HEADS + heads - HEADS - KV_HEADS) * (2 * HALF) + pairs
    tl.store(target, lower.to(q_out.dtype.element_ty))
    tl.store(target + HALF, upper.to(q_out.dtype.element_ty))


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


def rms_norm(x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, addends_STD: torch.Tensor | None = None) -> torch.Tensor:
    """As `Ops.rms_norm`, for contiguous tensors."""
    num_addends, addends = (0, x_TD) if addends_STD is None else (len(addends_STD), addends_STD)
    assert x_TD.is_contiguous() and addends.is_contiguous() and addends.shape[-2:] == x_TD.shape
    out_TD, width = torch.empty_like(x_TD), x_TD.shape[1]
    if len(x_TD):
        _rms_norm[(len(x_TD),)](
            x_TD, weight_D, addends, out_TD, eps, x_TD.numel(),
            ADDENDS=num_addends, WIDTH=width, BLOCK=triton.next_power_of_2(width), OVERLAP=x_TD.is_cuda,
            num_warps=NORM_WARPS, **launch_early(x_TD),
        )  # fmt: skip
    return out_TD


def swiglu(gate_up_TX: torch.Tensor) -> torch.Tensor:
    """silu(first half) * second half of the last dimension, of a contiguous tensor with at least one token."""
    assert gate_up_TX.is_contiguous()
    width = gate_up_TX.shape[1] // 2
    out_TI = gate_up_TX.new_empty((len(gate_up_TX), width))
    _swiglu[(len(out_TI) * triton.cdiv(width, SWIGLU_BLOCK),)](
        gate_up_TX, out_TI, WIDTH=width, BLOCK=SWIGLU_BLOCK, OVERLAP=out_TI.is_cuda, **launch_early(out_TI)
    )
    return out_TI


def norm_rope_store(
    qkv_TX: torch.Tensor,
    q_weight_K: torch.Tensor,
    k_weight_K: torch.Tensor,
    eps: float,
    cos_sin_TK: torch.Tensor,
    pool: KVPool,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """As `Ops.norm_rope_store_`, for contiguous tensors and a head_dim that is a power of two; `qkv_TX` is left as it is."""
    k_pool, v_pool = pool
    kv_heads, head_dim = k_pool.shape[2:]
    num_heads = qkv_TX.shape[1] // head_dim - 2 * kv_heads
    assert qkv_TX.is_contiguous() and cos_sin_TK.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
    q_THK = qkv_TX.new_empty((len(qkv_TX), num_heads, head_dim))
    group = math.gcd(num_heads, kv_heads, MAX_HEADS_PER_PROGRAM)
    grid = (len(qkv_TX), (num_heads + 2 * kv_heads) // group)
    _norm_rope_store[grid](
        qkv_TX, q_THK, k_pool, v_pool, slots_T, cos_sin_TK, q_weight_K, k_weight_K, eps,
        HEADS=num_heads, KV_HEADS=kv_heads, HALF=head_dim // 2, GROUP=group, OVERLAP=qkv_TX.is_cuda, num_warps=2, **launch_early(qkv_TX),
    )  # fmt: skip
    return q_THK


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
        OUT=num_out, WIDTH=width, NORM=norm is not None, GATED=gated, ADD=add, OVERLAP=x_1D.is_cuda,
        ROWS=rows, BLOCK=block, BLOCKS=triton.cdiv(width, block), num_warps=GEMV_WARPS, **launch_early(x_1D),
    )  # fmt: skip


def launch_early(x: torch.Tensor) -> dict[str, bool]:
    """Options of a kernel that waits by itself for the one before it. Triton's interpreter does not know them."""
    return {"launch_pdl": True} if x.is_cuda else {}


@cache
def num_multiprocessors(device: torch.device) -> int:
    """1 on a CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
