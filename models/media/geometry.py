"""Sizes of images in patches and tokens, for the server and the workers. Standard library only."""

import math
from dataclasses import dataclass

MAX_ASPECT_RATIO = 200

Grid = tuple[int, int, int]  # (t, h, w): frame pairs, patch rows, patch columns


def smart_resize(height: int, width: int, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """Return (height, width) in pixels of the resized image: multiples of `factor`, area within the limits, aspect ratio nearly kept, as
    transformers' `qwen2_vl` image processor. ValueError for an empty image or an aspect ratio above 200."""
    if height < 1 or width < 1:
        raise ValueError(f"an image needs at least one pixel, got {width}x{height}")
    check_aspect_ratio(height, width, "an image")
    return rounded_size(height, width, factor, min_pixels, max_pixels)


def check_aspect_ratio(height: int, width: int, what: str) -> None:
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ValueError(f"the aspect ratio of {what} must not exceed {MAX_ASPECT_RATIO}, got {width}x{height}")


def rounded_size(
    height: int, width: int, factor: int, min_pixels: int, max_pixels: int, num_frames: int = 1, num_counted: int = 1
) -> tuple[int, int]:
    """Round to multiples of `factor` with an area over `num_counted` frames within the limits; otherwise scale by that of `num_frames`."""
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    pixels = num_counted * new_height * new_width
    if pixels > max_pixels:
        scale = math.sqrt(num_frames * height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif pixels < min_pixels:
        scale = math.sqrt(min_pixels / (num_frames * height * width))
        new_height = math.ceil(height * scale / factor) * factor
        new_width = math.ceil(width * scale / factor) * factor
    return new_height, new_width


@dataclass(frozen=True, slots=True)
class VisionGeometry:
    """Geometry of images. Pixel limits are areas (height * width) after resizing."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int

    def grid(self, height: int, width: int) -> Grid:
        """Return the patch grid (1, h, w) of an image of this size, multiples of `merge_size`. ValueError as in `smart_resize`."""
        factor = self.patch_size * self.merge_size
        new_height, new_width = smart_resize(height, width, factor, self.min_pixels, self.max_pixels)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def num_tokens(self, grid: Grid) -> int:
        """Return the number of placeholder tokens of an item of this patch grid."""
        t, h, w = grid
        return t * h * w // self.merge_size**2

    def merged(self, grid: Grid) -> Grid:
        """Return the grid in tokens, (t, h / merge, w / merge)."""
        t, h, w = grid
        return t, h // self.merge_size, w // self.merge_size
