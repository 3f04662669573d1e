"""Conversion of decoded pixels to patches, equal to transformers' Pillow image processor (`qwen2_vl`): resize in Pillow's fixed-point
arithmetic, one axis after the other, then a split into patches. The patch embedding includes the normalisation x / 127.5 - 1: x - 128 is
exact in bfloat16."""

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from models.kernels.ops import TAP_BITS, Ops, Taps
from models.kernels.transfers import to_device
from models.media.geometry import Grid, VisionGeometry

PIXEL_SCALE = 127.5  # with p the pixel minus 128, (p + 0.5) / 127.5 is the reference's normalised value
MAX_CACHED_TAPS = 256  # a few tens of kB each
CUBIC = -0.5  # Pillow's bicubic parameter a
CUBIC_REACH = 2.0


class Preprocessor:
    """Preprocessor that caches the resampling weights of recent sizes."""

    def __init__(self, geometry: VisionGeometry, ops: Ops, device: torch.device) -> None:
        self._geometry, self._ops = geometry, ops
        self._taps = lru_cache(MAX_CACHED_TAPS)(lambda old, new: Taps(*(to_device(array, device) for array in make_taps(old, new))))

    def write_patches(self, image_HWC: torch.Tensor, grid: Grid, out_PX: torch.Tensor) -> None:
        """Fill `out_PX` (h * w of `grid`, C * patch_size ** 2) from a uint8 image, see `Ops.resample_to_patches_`."""
        patch, merge = self._geometry.patch_size, self._geometry.merge_size
        *first, (axis, size) = _passes(image_HWC.shape[0], image_HWC.shape[1], grid[1] * patch, grid[2] * patch)
        for earlier_axis, earlier_size in first:
            image_HWC = self._ops.resample(image_HWC, earlier_axis, self._taps(image_HWC.shape[earlier_axis], earlier_size))
        self._ops.resample_to_patches_(image_HWC, axis, self._taps(image_HWC.shape[axis], size), patch, merge, out_PX)


def _passes(old_height: int, old_width: int, height: int, width: int) -> list[tuple[int, int]]:
    """Return (axis, new size) of at least one pass. As in Pillow 13, the width is first unless the height loses more than twice as many
    pixels."""
    height_first = height < old_height and old_height - height > 2 * (old_width - width)
    sizes = [(0, height), (1, width)] if height_first else [(1, width), (0, height)]
    changed = [(axis, size) for axis, size in sizes if size != (old_height, old_width)[axis]]
    return changed or [(0, height)]


def make_taps(old: int, new: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return the first source pixel (new,) and the weights (new, taps) of an antialiased bicubic resampling from `old` to `new` pixels,
    as Pillow's `precompute_coeffs` and `normalize_coeffs_8bpc`, operation by operation."""
    if old == new:
        return np.arange(new, dtype=np.int32), np.full((new, 1), 1 << TAP_BITS, dtype=np.int32)
    scale = old / new
    stretch = max(scale, 1.0)
    support = CUBIC_REACH * stretch
    centre = (np.arange(new) + 0.5) * scale
    first = np.maximum(centre - support + 0.5, 0).astype(np.int64)
    end = np.minimum((centre + support + 0.5).astype(np.int64), old)
    source = first[:, None] + np.arange((end - first).max())
    weights = np.where(source < end[:, None], _cubic((source - centre[:, None] + 0.5) * (1.0 / stretch)), 0.0)
    weights /= np.add.accumulate(weights, axis=1)[:, -1:]  # summed from left to right, as Pillow does
    fixed = np.trunc(weights * (1 << TAP_BITS) + np.where(weights < 0, -0.5, 0.5))
    return first.astype(np.int32), fixed.astype(np.int32)


def _cubic(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = np.abs(x)
    near = ((CUBIC + 2.0) * x - (CUBIC + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * CUBIC
    return np.where(x < 1, near, np.where(x < 2, far, 0.0))
