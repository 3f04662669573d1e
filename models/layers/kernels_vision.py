"""Triton kernels of the vision tower: rotation, the way out of padded heads, LayerNorm. Called by `ops_cuda` and `segments_flashinfer`.

All are bound by memory: every value is read once and written once. Arithmetic is float32. Tests run them in Triton's interpreter.
"""

import torch
import triton
import triton.language as tl

ROWS_PER_TRIM = 4


@triton.jit
def _rotate_and_pad(
    kvq: tl.tensor,
    q_out: tl.tensor,
    cos_sin: tl.tensor,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
) -> None:
    """One program: one patch. Keys are rotated in place; queries go to `q_out`, each filled up with zeros to PADDED values."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (pairs < HALF) & (heads >= 0)
    cos = tl.load(cos_sin + row * (2 * HALF) + pairs, mask=pairs < HALF)
    sin = tl.load(cos_sin + row * (2 * HALF) + HALF + pairs, mask=pairs < HALF)
    keys = kvq + (row * (3 * HEADS) + heads) * (2 * HALF) + pairs
    lower, upper = tl.load(keys, mask=inside).to(tl.float32), tl.load(keys + HALF, mask=inside).to(tl.float32)
    tl.store(keys, (lower * cos - upper * sin).to(kvq.dtype.element_ty), mask=inside)
    tl.store(keys + HALF, (upper * cos + lower * sin).to(kvq.dtype.element_ty), mask=inside)
    queries = keys + 2 * HEADS * (2 * HALF)
    lower, upper = tl.load(queries, mask=inside).to(tl.float32), tl.load(queries + HALF, mask=inside).to(tl.float32)
    target = q_out + (row * HEADS + heads) * PADDED
    tl.store(target + pairs, (lower * cos - upper * sin).to(kvq.dtype.element_ty), mask=inside)
    tl.store(target + HALF + pairs, (upper * cos + lower * sin).to(kvq.dtype.element_ty), mask=inside)
    rest = 2 * HALF + tl.arange(0, PADDED)[None, :]
    tl.store(target + rest, tl.zeros([HEADS, PADDED], q_out.dtype.element_ty), mask=rest < PADDED)


@triton.jit(do_not_specialize=["num_rows"])
def _trim_heads(
    padded: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: ROWS heads of neighbouring patches, whose first WIDTH values are moved together."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < WIDTH)
    tl.store(out + row * WIDTH + column, tl.load(padded + row * PADDED + column, mask=mask), mask=mask)


@triton.jit
def _layer_norm(
    x: tl.tensor,
    offset: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program: a row of WIDTH values, to which OFFSETS values are added over and over."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    value += tl.load(offset + column % OFFSETS, mask=inside, other=0.0)
    centred = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    normed = centred * scale * tl.load(weight + column, mask=inside).to(tl.float32) + tl.load(bias + column, mask=inside).to(tl.float32)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), mask=inside)


def rotate_and_pad_(kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor, padded: int) -> torch.Tensor:
    """Rotates the keys (index 0 of the second dimension) in place and returns the rotated queries (index 2) as (P, H, padded).

    Tensors are contiguous, H and `padded` are powers of two. What follows a key or value within `padded` is inside its patch.
    """
    num_patches, _, num_heads, head_dim = kvq_P3HK.shape
    assert kvq_P3HK.is_contiguous() and cos_sin_PK.is_contiguous() and head_dim <= padded <= (num_heads + 1) * head_dim
    q_PHL = kvq_P3HK.new_empty((num_patches, num_heads, padded))
    _rotate_and_pad[(num_patches,)](
        kvq_P3HK, q_PHL, cos_sin_PK,
        HEADS=num_heads, HALF=head_dim // 2, PADDED=padded, BLOCK_HALF=triton.next_power_of_2(head_dim // 2), num_warps=8,
    )  # fmt: skip
    return q_PHL


def trim_heads(padded_PHL: torch.Tensor, head_dim: int) -> torch.Tensor:
    """(P, H, L) -> (P, H * head_dim): the first `head_dim` values of each head."""
    num_patches, num_heads, padded = padded_PHL.shape
    assert padded_PHL.is_contiguous()
    out_PD = padded_PHL.new_empty((num_patches, num_heads * head_dim))
    num_rows, rows = num_patches * num_heads, ROWS_PER_TRIM * num_heads
    _trim_heads[(triton.cdiv(num_rows, rows),)](
        padded_PHL, out_PD, num_rows,
        WIDTH=head_dim, PADDED=padded, ROWS=rows, BLOCK=triton.next_power_of_2(head_dim), num_warps=4,
    )  # fmt: skip
    return out_PD


def layer_norm(x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """As `Ops.layer_norm`, for contiguous tensors."""
    num_rows, width = x.shape
    assert x.is_contiguous() and offset_D.is_contiguous()
    out = torch.empty_like(x)
    _layer_norm[(num_rows,)](
        x, offset_D, weight, bias, out, eps,
        WIDTH=width, OFFSETS=len(offset_D), BLOCK=triton.next_power_of_2(width), num_warps=2 if width <= 2048 else 8,
    )  # fmt: skip
    return out
