"""From decoded pixels to the patches that the vision tower multiplies, on the images' device. Called by `models.vision`.

Equal to transformers' Pillow image processor (`qwen2_vl`) to within one uint8 level: resize, round to the uint8 grid, cut into patches. The
normalisation x / 127.5 - 1 is left to the patch embedding: x - 128 is exact in bfloat16, a normalised pixel is not.
"""

import torch
import torch.nn.functional as F

from models.geometry import Grid

PIXEL_OFFSET = 128  # patches hold pixel - 128; (p + 0.5) / 127.5 is the reference's normalised value
PIXEL_SCALE = 127.5


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
    """Antialiased bicubic resize of a uint8 image; uint8 if the size is right already, else float32 whole numbers of 0 to 255.

    Like Pillow it goes over the width, rounds, then over the height: rounding once, after both, differs by many levels on noise.
    """
    if image_CHW.shape[2] != width:
        image_CHW = _resize_rounded(image_CHW, image_CHW.shape[1], width)
    if image_CHW.shape[1] != height:
        image_CHW = _resize_rounded(image_CHW, height, width)
    return image_CHW


def _resize_rounded(image_CHW: torch.Tensor, height: int, width: int) -> torch.Tensor:
    resized = F.interpolate(image_CHW[None].float(), size=(height, width), mode="bicubic", antialias=True)[0]
    return resized.add_(0.5).floor_().clamp_(0, 255)
