"""Memory-bound Triton kernels of the decoder."""

import math

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.ops import FLOAT8, MOST_FLOAT8, KVPool, NewHeads
from models.kernels.stream import Normed
from models.kernels.triton.launch import await_kernel, await_previous_kernel, cdiv, floats, kernel, power_of_2, start_next_kernel
from models.weights.float8 import GroupScaled

MAX_HEADS_PER_PROGRAM = 4
MANY_TOKENS, HEADS_OF_MANY = 32, 16  # from so many tokens on, a program processes several, with so many heads in total
NORM_WARPS, ROTARY_TOKENS = 8, 4
SWIGLU_BLOCK = 1024


@triton.jit
def _store(
    value: tensor, out: tensor, scales: tensor, token: tensor, first: tensor, scale_stride: tensor, SCALED: constexpr, WIDTH: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """Store columns `first : first + BLOCK` of a token's WIDTH values; if SCALED, quantized as in `GroupScaled.quantized`."""
    if SCALED:
        groups = tl.reshape(value, (BLOCK // 128, 128))
        scale = tl.maximum(tl.max(tl.abs(groups), 1) / 448.0, 1e-30)
        group = first // 128 + tl.arange(0, BLOCK // 128)
        column = group[:, None] * 128 + tl.arange(0, 128)[None, :]
        inside = group < WIDTH // 128
        tl.store(out + token * WIDTH + column, (groups / scale[:, None]).to(tl.float8e4nv), inside[:, None])
        tl.store(scales + group * scale_stride + token, scale, inside)
    else:
        column = first + tl.arange(0, BLOCK)
        tl.store(out + token * WIDTH + column, value.to(out.dtype.element_ty), column < WIDTH)


@kernel(do_not_specialize=["scale_stride"])
def _rms_norm(
    x: tensor, weight: tensor, addends: tensor, out: tensor, rounded: tensor, scales: tensor, scale_stride: tensor, eps: tensor,
    addend_size: tensor, counts: tensor, ADDENDS: constexpr, PLAIN: constexpr, SCALED: constexpr, WIDTH: constexpr, BLOCK: constexpr,
    COUNTS: constexpr, EARLY: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: one token after adding ADDENDS values. The first one clears COUNTS counts."""
    start_next_kernel(OVERLAP, EARLY)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    token = tl.program_id(0).to(tl.int64)
    place = token * WIDTH + column
    scale = floats(weight + column, inside)
    await_previous_kernel(OVERLAP)
    if COUNTS and token == 0:
        tl.store(counts + column, tl.zeros((BLOCK,), tl.int32), column < COUNTS)
    value = floats(x + place, inside)
    if ADDENDS > 0:
        for part in tl.static_range(ADDENDS):
            value += floats(addends + part * addend_size + place, inside)
        whole = value.to(x.dtype.element_ty)
        tl.store(x + place, whole, inside)
        value = whole.to(tl.float32)
    value *= tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * scale
    if PLAIN:
        _store(value, out, scales, token, 0, scale_stride, False, WIDTH, BLOCK)
    if SCALED:
        _store(value.to(x.dtype.element_ty).to(tl.float32), rounded, scales, token, 0, scale_stride, True, WIDTH, BLOCK)


@kernel(do_not_specialize=["scale_stride"])
def _swiglu(
    gate_up: tensor, out: tensor, scales: tensor, scale_stride: tensor, SCALED: constexpr, WIDTH: constexpr, BLOCK: constexpr,
    EARLY: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK values of one token."""
    start_next_kernel(OVERLAP, EARLY)
    BLOCKS: tl.constexpr = (WIDTH + BLOCK - 1) // BLOCK
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    first = tl.program_id(0) % BLOCKS * BLOCK
    column = first + tl.arange(0, BLOCK)
    inside = column < WIDTH
    await_kernel(OVERLAP)
    gate = floats(gate_up + token * (2 * WIDTH) + column, inside)
    up = floats(gate_up + token * (2 * WIDTH) + WIDTH + column, inside)
    value = gate / (1 + tl.exp(-gate)) * up
    if SCALED:
        value = value.to(gate_up.dtype.element_ty).to(tl.float32)
    _store(value, out, scales, token, first, scale_stride, SCALED, WIDTH, BLOCK)


@kernel(do_not_specialize=["scale_stride"])
def _quantize(
    x: tensor, out: tensor, scales: tensor, scale_stride: tensor, WIDTH: constexpr, BLOCK: constexpr, EARLY: constexpr,
    OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: one token."""
    start_next_kernel(OVERLAP, EARLY)
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    await_kernel(OVERLAP)
    value = floats(x + token * WIDTH + column, column < WIDTH)
    _store(value, out, scales, token, 0, scale_stride, True, WIDTH, BLOCK)


# No recompilation for another alignment of a staging slice.
@kernel(do_not_specialize=["num_tokens", "stride"], do_not_specialize_on_alignment=["positions"])
def _rotary_rows(
    positions: tensor, axis: tensor, inv_freq: tensor, out: tensor, num_tokens: tensor, stride: tensor, HALF: constexpr, TOKENS: constexpr,
    OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: TOKENS tokens, whose positions on the next axis are `stride` further."""
    token, pair = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None], tl.arange(0, HALF)[None, :]
    await_kernel(OVERLAP)
    position = tl.load(positions + tl.load(axis + pair) * stride + token, token < num_tokens, 0)
    angle = position.to(tl.float32) * tl.load(inv_freq + pair)
    place = out + token * (2 * HALF) + pair
    tl.store(place, tl.cos(angle), token < num_tokens)
    tl.store(place + HALF, tl.sin(angle), token < num_tokens)


@triton.jit
def _store_heads(
    value: tensor, target: tensor, inside: tensor, pool: tensor, scale: tensor, is_cached: tensor, PLACE: constexpr, MOST: constexpr,
) -> None:  # fmt: skip
    """Store values from PLACE on; if they are cached in float8 (MOST), divided by their scale."""
    if MOST > 0 and is_cached:
        value = value.to(target.dtype.element_ty).to(tl.float32) / scale
        value = tl.where(value == value, tl.minimum(tl.maximum(value, -MOST), MOST), 0.0)
        tl.store(target.to(pool.dtype) + PLACE, value.to(pool.dtype.element_ty), inside)
    else:
        tl.store(target + PLACE, value.to(target.dtype.element_ty), inside)


@kernel(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])  # slots: as above
def _norm_rope_store(
    qkv: tensor, q_out: tensor, k_pool: tensor, v_pool: tensor, slots: tensor, cos_sin: tensor, q_weight: tensor, k_weight: tensor,
    eps: tensor, num_tokens: tensor, stride: tensor, k_scale: tensor, v_scale: tensor, HEADS: constexpr, KV_HEADS: constexpr,
    DIM: constexpr, HALF: constexpr, GROUP: constexpr, TOKENS: constexpr, NORMED: constexpr, MOST: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """One program: GROUP neighbouring heads, which are all queries, all keys or all values, of TOKENS tokens. Two halves of a head are
    rotated; its other values come in pieces of as many. MOST: the largest value of a cache in float8, otherwise 0."""
    await_previous_kernel(OVERLAP)
    first, row = tl.program_id(1) * GROUP, tl.arange(0, TOKENS * GROUP)[:, None]
    token, heads = (tl.program_id(0) * TOKENS + row // GROUP).to(tl.int64), first + row % GROUP
    inside, pairs = token < num_tokens, tl.arange(0, HALF)[None, :]
    source = qkv + token * stride + heads * DIM + pairs
    lower = floats(source, inside)
    upper = floats(source + HALF, inside)
    scale = tl.full((TOKENS * GROUP, 1), 1.0, tl.float32)
    weight = tl.where(first < HEADS, q_weight, k_weight) if NORMED else q_weight
    if first < HEADS + KV_HEADS:
        if NORMED:
            squares = tl.sum(lower * lower, 1) + tl.sum(upper * upper, 1)
            for piece in tl.static_range(2, DIM // HALF):
                other = floats(source + piece * HALF, inside)
                squares += tl.sum(other * other, 1)
            scale = tl.rsqrt(squares / DIM + eps)[:, None]
            lower = lower * scale * tl.load(weight + pairs).to(tl.float32)
            upper = upper * scale * tl.load(weight + HALF + pairs).to(tl.float32)
        cos = tl.load(cos_sin + token * (2 * HALF) + pairs, inside, 0.0)
        sin = tl.load(cos_sin + token * (2 * HALF) + HALF + pairs, inside, 0.0)
        lower, upper = lower * cos - upper * sin, upper * cos + lower * sin
    target, cache_scale = q_out + (token * HEADS + heads) * DIM + pairs, k_scale
    if first >= HEADS:
        slot = tl.load(slots + token, inside, 0)
        target = (k_pool + (slot * KV_HEADS + heads - HEADS) * DIM + pairs).to(q_out.dtype)
        if first >= HEADS + KV_HEADS:
            lower = tl.where(tl.abs(lower) < float("inf"), lower, 0.0)
            upper = tl.where(tl.abs(upper) < float("inf"), upper, 0.0)
            target = (v_pool + (slot * KV_HEADS + heads - HEADS - KV_HEADS) * DIM + pairs).to(q_out.dtype)
            if MOST:
                cache_scale = v_scale
    for piece in tl.static_range(2, DIM // HALF):
        rest = floats(source + piece * HALF, inside)
        if first < HEADS + KV_HEADS:
            if NORMED:
                rest = rest * scale * tl.load(weight + piece * HALF + pairs).to(tl.float32)
        else:
            rest = tl.where(tl.abs(rest) < float("inf"), rest, 0.0)
        _store_heads(rest, target, inside, k_pool, cache_scale, first >= HEADS, piece * HALF, MOST)
    _store_heads(lower, target, inside, k_pool, cache_scale, first >= HEADS, 0, MOST)
    _store_heads(upper, target, inside, k_pool, cache_scale, first >= HEADS, HALF, MOST)


@kernel()
def _gate(x: tensor, gate: tensor, stride: tensor, WIDTH: constexpr, GROUP: constexpr, BLOCK: constexpr, OVERLAP: constexpr) -> None:
    """Program (t, i): BLOCK values of token t."""
    await_previous_kernel(OVERLAP)
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    logit = floats(gate + token * stride + column // GROUP, inside)
    value = floats(x + token * WIDTH + column, inside) / (1.0 + tl.exp(-logit))
    tl.store(x + token * WIDTH + column, value.to(x.dtype.element_ty), inside)


def rms_norm(
    normed: Normed, out_TD: torch.Tensor | None, rounded: GroupScaled | None = None, counts: torch.Tensor | None = None,
    is_early: bool = False,
) -> None:  # fmt: skip
    """Write a norm to `out_TD` and `rounded`, whichever are given, its stream if there are parts, and zeros to up to D `counts`.
    `is_early`, here and below: the next kernel has something to do before it waits for this one."""
    x_TD, parts_STD = normed.stream_TD, normed.parts_STD
    num_addends, addends = (0, x_TD) if parts_STD is None else (len(parts_STD), parts_STD)
    assert x_TD.is_contiguous() and addends.is_contiguous() and addends.shape[-2:] == x_TD.shape
    (num_tokens, width), room = x_TD.shape, (None, None, 0) if rounded is None else (rounded.padded, rounded.scales, len(rounded.padded))
    assert counts is None or len(counts) <= width
    if num_tokens:
        _rms_norm[(num_tokens,)](
            x_TD, normed.weight_D, addends, out_TD, *room, normed.eps, x_TD.numel(), counts,
            ADDENDS=num_addends, PLAIN=out_TD is not None, SCALED=rounded is not None, WIDTH=width, BLOCK=power_of_2(width),
            COUNTS=0 if counts is None else len(counts), EARLY=is_early, num_warps=NORM_WARPS,
        )  # fmt: skip


def swiglu(gate_up_TX: torch.Tensor) -> torch.Tensor:
    out_TI = gate_up_TX.new_empty((len(gate_up_TX), gate_up_TX.shape[1] // 2))
    _launch_swiglu(gate_up_TX, out_TI, None)
    return out_TI


def swiglu_quantized(gate_up_TX: torch.Tensor, is_early: bool = False) -> GroupScaled:
    made = GroupScaled.empty(len(gate_up_TX), gate_up_TX.shape[1] // 2, gate_up_TX.device)
    _launch_swiglu(gate_up_TX, made.padded, made.scales, is_early)
    return made


def _launch_swiglu(gate_up_TX: torch.Tensor, out: torch.Tensor, scales: torch.Tensor | None, is_early: bool = False) -> None:
    assert gate_up_TX.is_contiguous()
    num_tokens, width = len(gate_up_TX), gate_up_TX.shape[1] // 2
    _swiglu[(num_tokens * cdiv(width, SWIGLU_BLOCK),)](
        gate_up_TX, out, scales, len(out), SCALED=scales is not None, WIDTH=width, BLOCK=SWIGLU_BLOCK, EARLY=is_early
    )


def gate(x_TX: torch.Tensor, gate_TG: torch.Tensor) -> None:
    """Implement `Ops.gate_`."""
    num_tokens, width = x_TX.shape
    assert x_TX.is_contiguous() and gate_TG.stride(1) == 1
    block = min(1024, power_of_2(width))
    if num_tokens:
        _gate[(num_tokens, cdiv(width, block))](x_TX, gate_TG, gate_TG.stride(0), WIDTH=width, GROUP=width // gate_TG.shape[1], BLOCK=block)


def quantized(x_TD: torch.Tensor, is_early: bool = False) -> GroupScaled:
    """Implement `GroupScaled.quantized` for at least one token."""
    assert x_TD.is_contiguous()
    (num_tokens, width), out = x_TD.shape, GroupScaled.like(x_TD)
    _quantize[(num_tokens,)](
        x_TD, out.padded, out.scales, len(out.padded), WIDTH=width, BLOCK=power_of_2(width), EARLY=is_early, num_warps=NORM_WARPS
    )
    return out


def rotary_rows(positions_AT: torch.Tensor, axis_J: torch.Tensor, inv_freq_J: torch.Tensor) -> torch.Tensor:
    """Implement `Ops.rotary_rows` for a K / 2 that is a power of two."""
    num_tokens, half = positions_AT.shape[1], len(inv_freq_J)
    assert positions_AT.stride(1) == 1 or num_tokens <= 1
    out_TK = inv_freq_J.new_empty((num_tokens, 2 * half))
    if num_tokens:
        _rotary_rows[(cdiv(num_tokens, ROTARY_TOKENS),)](
            positions_AT, axis_J, inv_freq_J, out_TK, num_tokens, positions_AT.stride(0),
            HALF=half, TOKENS=ROTARY_TOKENS,
        )  # fmt: skip
    return out_TK


def norm_rope_store(heads: NewHeads, pool: KVPool) -> torch.Tensor:
    """Implement `Ops.norm_rope_store_` for a head_dim that is a power of two, and a power of two of rotated values."""
    qkv_TX, cos_sin_TK = heads.qkv_TX, heads.cos_sin_TK
    k_pool, v_pool = pool
    kv_heads, head_dim = k_pool.shape[2:]
    num_heads = qkv_TX.shape[1] // head_dim - 2 * kv_heads
    assert qkv_TX.stride(1) == 1 and cos_sin_TK.is_contiguous() and k_pool.is_contiguous() and v_pool.is_contiguous()
    num_tokens, group = len(qkv_TX), math.gcd(num_heads, kv_heads, MAX_HEADS_PER_PROGRAM)
    tokens = 1 if num_tokens < MANY_TOKENS else HEADS_OF_MANY // group
    q_THK = qkv_TX.new_empty((num_tokens, num_heads, head_dim))
    grid, is_float8 = (cdiv(num_tokens, tokens), (num_heads + 2 * kv_heads) // group), k_pool.dtype == FLOAT8
    _norm_rope_store[grid](
        qkv_TX, q_THK, k_pool, v_pool, heads.slots_T, cos_sin_TK, heads.q_weight_K, heads.k_weight_K, heads.eps, num_tokens,
        qkv_TX.stride(0), *(heads.scales if is_float8 else (None, None)),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=head_dim, HALF=cos_sin_TK.shape[1] // 2, GROUP=group, TOKENS=tokens,
        NORMED=heads.q_weight_K is not None, MOST=int(MOST_FLOAT8) if is_float8 else 0, num_warps=2 if tokens == 1 else 4,
    )  # fmt: skip
    return q_THK
