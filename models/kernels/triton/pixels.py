"""Triton kernels that resample one axis in Pillow's fixed-point arithmetic. Sizes are not compile-time constants."""

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.ops import PIXEL_OFFSET, TAP_BITS, Taps
from models.kernels.triton.launch import cdiv, kernel

BLOCK = 1024
CHANNELS = 3


@triton.jit
def _weigh(
    source: tensor, position: tensor, step: tensor, tap: tensor, limit: tensor, weights: tensor, row: tensor, taps: tensor, BITS: constexpr,
    mask: tensor,
) -> tensor:  # fmt: skip
    """Accumulate taps `tap ...` of `limit` at `position`, `position + step`, ... to values of 0 to 255."""
    total = tl.full(position.shape, 1 << (BITS - 1), tl.int32)
    for t in range(taps):
        inside = mask & (tap + t < limit)
        total += tl.load(source + position + t * step, inside, 0).to(tl.int32) * tl.load(weights + row * taps + t, mask)
    return tl.minimum(tl.maximum(total >> BITS, 0), 255)


@kernel(do_not_specialize=["count", "old", "new", "inner", "taps"])
def _resample(
    source: tensor, first: tensor, weights: tensor, target: tensor, count: tensor, old: tensor, new: tensor, inner: tensor, taps: tensor,
    BITS: constexpr, BLOCK: constexpr,
) -> None:  # fmt: skip
    """(outer, old, inner) -> (outer, new, inner). One program: BLOCK neighbouring values of the result."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < count
    row = (n // inner) % new
    tap = tl.load(first + row, mask, 0)
    position = (n // inner // new * old + tap) * inner + n % inner
    value = _weigh(source, position, inner, tap, old, weights, row, taps, BITS, mask)
    tl.store(target + n, value.to(tl.uint8), mask)


@kernel(do_not_specialize=["count", "height", "width", "columns", "taps"])
def _resample_to_patches(
    source: tensor, first: tensor, weights: tensor, target: tensor, count: tensor, height: tensor, width: tensor, columns: tensor,
    taps: tensor, AXIS: constexpr, PATCH: constexpr, MERGE: constexpr, BITS: constexpr, CHANNELS: constexpr, OFFSET: constexpr,
    BLOCK: constexpr,
) -> None:  # fmt: skip
    """One program: BLOCK neighbouring values of the patches."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = n < count
    patch, within = n // (CHANNELS * PATCH * PATCH), n % (CHANNELS * PATCH * PATCH)
    block, corner = patch // (MERGE * MERGE), patch % (MERGE * MERGE)
    blocks_per_row = columns // MERGE
    y = ((block // blocks_per_row) * MERGE + corner // MERGE) * PATCH + (within // PATCH) % PATCH
    x = ((block % blocks_per_row) * MERGE + corner % MERGE) * PATCH + within % PATCH
    channel = within // (PATCH * PATCH)
    if AXIS == 0:
        row, step, old = y, width * CHANNELS, height
    else:
        row, step, old = x, CHANNELS, width
    tap = tl.load(first + row, mask, 0)
    position = (tap.to(tl.int64) * width + x) * CHANNELS + channel if AXIS == 0 else (y * width + tap) * CHANNELS + channel
    value = _weigh(source, position, step, tap, old, weights, row, taps, BITS, mask)
    tl.store(target + n, (value - OFFSET).to(target.dtype.element_ty), mask)


def resample(image_HWC: torch.Tensor, axis: int, taps: Taps) -> torch.Tensor:
    image_HWC = image_HWC.contiguous()
    shape = list(image_HWC.shape)
    old, new = shape[axis], len(taps.first)
    shape[axis] = new
    out_HWC = image_HWC.new_empty(shape)
    _resample[(cdiv(out_HWC.numel(), BLOCK),)](
        image_HWC, taps.first, taps.weights, out_HWC, out_HWC.numel(), old, new, image_HWC.stride(axis), taps.weights.shape[1],
        BITS=TAP_BITS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out_HWC


def resample_to_patches_(image_HWC: torch.Tensor, axis: int, taps: Taps, patch_size: int, merge_size: int, out_PX: torch.Tensor) -> None:
    image_HWC = image_HWC.contiguous()
    height, width, channels = image_HWC.shape
    assert channels == CHANNELS and out_PX.is_contiguous()
    columns = (len(taps.first) if axis == 1 else width) // patch_size
    _resample_to_patches[(cdiv(out_PX.numel(), BLOCK),)](
        image_HWC, taps.first, taps.weights, out_PX, out_PX.numel(), height, width, columns, taps.weights.shape[1],
        AXIS=axis, PATCH=patch_size, MERGE=merge_size, BITS=TAP_BITS,
        CHANNELS=CHANNELS, OFFSET=PIXEL_OFFSET, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
