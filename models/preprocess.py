"""From decoded pixels to the patches that the vision tower multiplies, on the images' device. Called by `models.qwen3_vl`.

Equal to transformers' Pillow image processor (`qwen2_vl`) to within one uint8 level: resize, round to the uint8 grid, cut into patches. The
normalisation x / 127.5 - 1 is left to the patch embedding: x - 128 is exact in bfloat16, a normalised pixel is not.
"""

import torch
import torch.nn.functional as F

from models.geometry import Grid

PIXEL_OFFSET = 128  # patches hold pixel - 128; (p + 0.5) / 127.5 is the reference's normalised value
PIXEL_SCALE = 127.5
MAX_BAND_PIXELS = 1 << 24  # resized at once: bounds the working memory to about 1 GB for the largest images


def write_patches(image_HWC: torch.Tensor, grid: Grid, patch_size: int, merge_size: int, out_PX: torch.Tensor) -> None:
    """Fills `out_PX` (h * w of `grid`, C * patch_size ** 2) with the resized image's pixels minus 128.

    `image_HWC` is uint8. Patches are in merge-block order (block row, block column, row in block, column in block), a patch is (C, y, x):
    the reference's order, without its second, equal frame.
    """
    _, rows, columns = grid
    height, width = rows * patch_size, columns * patch_size
    pixels_CHW = resize(image_HWC.permute(2, 0, 1), height, width)
    blocks = pixels_CHW.unflatten(2, (-1, merge_size, patch_size)).unflatten(1, (-1, merge_size, patch_size))  # C, Y, i, y, X, j, x
    ordered = blocks.permute(1, 4, 2, 5, 0, 3, 6)  # Y, X, i, j, C, y, x
    out_PX.view(ordered.shape).copy_(ordered)
    out_PX.sub_(PIXEL_OFFSET)


def resize(image_CHW: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Antialiased bicubic resize of a uint8 image.

    Like Pillow it goes over one axis, rounds, then over the other: rounding once, after both, differs by many levels on noise. The width
    comes first unless the height loses more than twice as many pixels, which is the order of Pillow 13 (older ones: always the width).
    """
    _, old_height, old_width = image_CHW.shape
    height_first = height < old_height and old_height - height > 2 * (old_width - width)
    for axis, size in ((1, height), (2, width)) if height_first else ((2, width), (1, height)):
        if image_CHW.shape[axis] != size:
            image_CHW = _resize_axis(image_CHW, axis, size)
    return image_CHW


def _resize_axis(image_CHW: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """Along one axis, in bands of the other one: float64 (float32 rounds one pixel in a thousand the other way) takes 8 bytes a value."""
    other = 3 - axis
    bands = image_CHW.split(max(1, MAX_BAND_PIXELS // image_CHW.shape[axis]), dim=other)
    return torch.cat([_resize_band(band, (size, band.shape[2]) if axis == 1 else (band.shape[1], size)) for band in bands], dim=other)


def _resize_band(band_CHW: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
    resized = F.interpolate(band_CHW[None].double(), size=size, mode="bicubic", antialias=True)[0]
    return resized.add_(0.5).floor_().clamp_(0, 255).to(torch.uint8)
