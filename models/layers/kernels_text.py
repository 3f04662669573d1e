"""Triton kernels of the decoder: q/k norm, rotation and KV write in one pass; matrix times a few vectors. Called by `ops_cuda`.

All are bound by memory: every value is read once and written once. Arithmetic is float32. Tests run them in Triton's interpreter.
"""

import math

import torch
import triton
import triton.language as tl

from models.layers.ops import KVPool

MAX_HEADS_PER_PROGRAM = 8
GEMV_ROWS = 8
GEMV_CHUNK = 512


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
) -> None:
    """One program: one token, GROUP neighbouring heads, which are all queries, all keys or all values."""
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
        target = v_pool + (slot * KV_HEADS + heads - HEADS - KV_HEADS) * (2 * HALF) + pairs
    tl.store(target, lower.to(q_out.dtype.element_ty))
    tl.store(target + HALF, upper.to(q_out.dtype.element_ty))


@triton.jit
def _gemv(
    x: tl.tensor,
    norm_weight: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    OUT: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    """One program: ROWS values of the result for every token. The norm's factor is the same for a token's whole row: it comes last."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, CHUNK)
    token = tl.arange(0, BLOCK_TOKENS)
    gate = weight + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    total = tl.zeros([ROWS, BLOCK_TOKENS, CHUNK], tl.float32)
    other = tl.zeros([ROWS, BLOCK_TOKENS, CHUNK], tl.float32)
    squares = tl.zeros([BLOCK_TOKENS, CHUNK], tl.float32)
    for start in range(0, WIDTH, CHUNK):
        inside = (row < OUT)[:, None] & (column < WIDTH - start)[None, :]
        first = tl.load(gate + start, mask=inside, other=0.0)
        if GATED:
            second = tl.load(gate + OUT * WIDTH + start, mask=inside, other=0.0)
        known = (token < TOKENS)[:, None] & (column < WIDTH - start)[None, :]
        value = tl.load(x + token[:, None] * WIDTH + start + column[None, :], mask=known, other=0.0).to(tl.float32)
        if NORM:
            squares += value * value
            value *= tl.load(norm_weight + start + column, mask=column < WIDTH - start, other=0.0).to(tl.float32)[None, :]
        total += first.to(tl.float32)[:, None, :] * value[None, :, :]
        if GATED:
            other += second.to(tl.float32)[:, None, :] * value[None, :, :]
    result = tl.sum(total, 2)
    up = tl.sum(other, 2)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, 1) / WIDTH + eps)[None, :]
        result *= scale
        up *= scale
    if GATED:
        result = result / (1 + tl.exp(-result)) * up
    target = out + token[None, :] * OUT + row[:, None]
    mask = (row < OUT)[:, None] & (token < TOKENS)[None, :]
    if ADD:
        result += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, result.to(out.dtype.element_ty), mask=mask)


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
        HEADS=num_heads, KV_HEADS=kv_heads, HALF=head_dim // 2, GROUP=group, num_warps=2,
    )  # fmt: skip
    return q_THK


def gemv(x_TD: torch.Tensor, weight_ND: torch.Tensor, dtype: torch.dtype, norm: tuple[torch.Tensor, float] | None = None) -> torch.Tensor:
    """norm(x) @ weight.T as `dtype` for a few tokens; `norm` is (weight, eps) of an RMSNorm, or None."""
    out_TN = x_TD.new_empty((len(x_TD), len(weight_ND)), dtype=dtype)
    _launch_gemv(x_TD, norm, weight_ND, out_TN, gated=False, add=False)
    return out_TN


def gemv_swiglu(x_TD: torch.Tensor, weight_ND: torch.Tensor, norm: tuple[torch.Tensor, float]) -> torch.Tensor:
    """silu(g) * u for a few tokens, where g and u are the halves of norm(x) @ weight.T."""
    out_TI = x_TD.new_empty((len(x_TD), len(weight_ND) // 2))
    _launch_gemv(x_TD, norm, weight_ND, out_TI, gated=True, add=False)
    return out_TI


def gemv_add_(x_TD: torch.Tensor, weight_ND: torch.Tensor, residual_TN: torch.Tensor) -> None:
    """residual += x @ weight.T for a few tokens."""
    _launch_gemv(x_TD, None, weight_ND, residual_TN, gated=False, add=True)


def _launch_gemv(
    x_TD: torch.Tensor, norm: tuple[torch.Tensor, float] | None, weight_ND: torch.Tensor, out_TN: torch.Tensor, gated: bool, add: bool
) -> None:
    assert x_TD.is_contiguous() and weight_ND.is_contiguous() and out_TN.is_contiguous()
    norm_weight, eps = norm or (x_TD, 0.0)
    num_tokens, width = x_TD.shape
    num_out = out_TN.shape[1]
    rows = GEMV_ROWS
    _gemv[(triton.cdiv(num_out, rows),)](
        x_TD, norm_weight, weight_ND, out_TN, eps,
        OUT=num_out, WIDTH=width, TOKENS=num_tokens, BLOCK_TOKENS=triton.next_power_of_2(num_tokens),
        NORM=norm is not None, GATED=gated, ADD=add, ROWS=rows, CHUNK=GEMV_CHUNK, num_warps=4,
    )  # fmt: skip
