"""Two Triton kernels: the decoder's q/k norm, rotation and KV write in one pass, and the vision tower's rotation. Called by `ops_cuda`.

Both are bound by memory: every value is read once and written once. Arithmetic is float32. Tests run them in Triton's interpreter.
"""

import math

import torch
import triton
import triton.language as tl

from models.layers.ops import KVPool

MAX_HEADS_PER_PROGRAM = 8


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


@triton.jit(do_not_specialize=["num_patches"])
def _rotate_vision(
    qkv: tl.tensor,
    cos_sin: tl.tensor,
    num_patches: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One program: one patch, all its query and key heads, which lie side by side (the values behind them are left alone)."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, BLOCK_HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (heads < 2 * HEADS) & (pairs < HALF)
    place = qkv + (row * (3 * HEADS) + heads) * (2 * HALF) + pairs
    table = cos_sin + (row % num_patches) * (2 * HALF) + pairs
    lower = tl.load(place, mask=mask).to(tl.float32)
    upper = tl.load(place + HALF, mask=mask).to(tl.float32)
    cos = tl.load(table, mask=pairs < HALF)
    sin = tl.load(table + HALF, mask=pairs < HALF)
    tl.store(place, (lower * cos - upper * sin).to(qkv.dtype.element_ty), mask=mask)
    tl.store(place + HALF, (upper * cos + lower * sin).to(qkv.dtype.element_ty), mask=mask)


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


def rotate_vision_(qkv_BP3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> None:
    """As `Ops.rotate_vision_`, for contiguous tensors."""
    batch, num_patches, _, num_heads, head_dim = qkv_BP3HK.shape
    assert qkv_BP3HK.is_contiguous() and cos_sin_PK.is_contiguous()
    _rotate_vision[(batch * num_patches,)](
        qkv_BP3HK, cos_sin_PK, num_patches,
        HEADS=num_heads, HALF=head_dim // 2,
        BLOCK_HEADS=triton.next_power_of_2(2 * num_heads), BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=4,
    )  # fmt: skip
