"""Memory-bound Triton kernels of the vision tower."""

import torch
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.triton.launch import floats, kernel, power_of_2


@kernel()
def _rotate(kvq: tensor, cos_sin: tensor, HEADS: constexpr, HALF: constexpr, BLOCK_HALF: constexpr) -> None:
    """One program: the keys or the queries of one patch."""
    row = tl.program_id(0).to(tl.int64)
    part = 2 * tl.program_id(1)  # keys are the first third, queries the last
    heads = tl.arange(0, HEADS)[:, None]
    pairs = tl.arange(0, BLOCK_HALF)[None, :]
    inside = (pairs < HALF) & (heads >= 0)
    cos = tl.load(cos_sin + row * (2 * HALF) + pairs, pairs < HALF)
    sin = tl.load(cos_sin + row * (2 * HALF) + HALF + pairs, pairs < HALF)
    place = kvq + ((row * 3 + part) * HEADS + heads) * (2 * HALF) + pairs
    lower, upper = tl.load(place, inside).to(tl.float32), tl.load(place + HALF, inside).to(tl.float32)
    tl.store(place, (lower * cos - upper * sin).to(kvq.dtype.element_ty), inside)
    tl.store(place + HALF, (upper * cos + lower * sin).to(kvq.dtype.element_ty), inside)


@kernel()
def _layer_norm(
    x: tensor, offset: tensor, weight: tensor, bias: tensor, out: tensor, eps: tensor, WIDTH: constexpr, OFFSETS: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """One program: a row of WIDTH values, to which OFFSETS values are added repeatedly."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    value = floats(x + row * WIDTH + column, inside)
    value += tl.load(offset + column % OFFSETS, inside, 0.0)
    centred = tl.where(inside, value - tl.sum(value, 0) / WIDTH, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / WIDTH + eps)
    normed = centred * scale * tl.load(weight + column, inside).to(tl.float32) + tl.load(bias + column, inside).to(tl.float32)
    tl.store(out + row * WIDTH + column, normed.to(out.dtype.element_ty), inside)


def rotate_(kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> None:
    """Rotate keys and queries in place. H is a power of two."""
    num_patches, _, num_heads, head_dim = kvq_P3HK.shape
    assert kvq_P3HK.is_contiguous() and cos_sin_PK.is_contiguous()
    _rotate[(num_patches, 2)](kvq_P3HK, cos_sin_PK, HEADS=num_heads, HALF=head_dim // 2, BLOCK_HALF=power_of_2(head_dim // 2), num_warps=4)


def layer_norm(x: torch.Tensor, offset_D: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Implement `Ops.layer_norm` for contiguous tensors."""
    num_rows, width = x.shape
    assert x.is_contiguous() and offset_D.is_contiguous()
    out = torch.empty_like(x)
    _layer_norm[(num_rows,)](
        x, offset_D, weight, bias, out, eps,
        WIDTH=width, OFFSETS=len(offset_D), BLOCK=power_of_2(width), num_warps=2 if width <= 2048 else 8,
    )  # fmt: skip
    return out
