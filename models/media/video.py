"""Sampling, sizes and times of video frames, with the formulas of transformers' `Qwen3VLVideoProcessor`. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.media.geometry import Grid, check_aspect_ratio, rounded_size

DEFAULT_SOURCE_FPS = 24.0  # for a video without a frame rate
FLOOR_MARGIN = 1.05  # a capped video keeps slightly more than the minimum of pixels


@dataclass(frozen=True, slots=True)
class VideoGeometry:
    """Geometry of videos. `min_pixels` and `max_pixels` limit frames * height * width after resizing."""

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    fps: float = 2.0
    min_frames: int = 4  # by `fps`
    max_frames: int = 768
    num_frames: int | None = None  # instead of `fps`
    samples: bool = True  # otherwise all frames are used
    max_frame_tokens: int | None = None  # None: no limit

    def sample(self, total: int, source_fps: float | None) -> list[int]:
        """Return ascending indices of frames; always `num_frames` if set, even if the video has fewer."""
        if not self.samples:
            return list(range(total))
        num_frames = self.num_frames
        if num_frames is None:
            num_frames = int(total / (source_fps or DEFAULT_SOURCE_FPS) * self.fps)
            num_frames = min(max(num_frames, self.min_frames), self.max_frames, total)
        indices: list[int] = np.linspace(0, total - 1, num_frames).round().astype(int).tolist()
        return indices

    def grid(self, num_frames: int, height: int, width: int) -> Grid:
        """Return the patch grid (pairs, h, w) of so many frames of this size; h and w are multiples of `merge_size`. ValueError for a
        single or empty frame, or an aspect ratio above 200."""
        if num_frames < self.temporal_patch_size:
            raise ValueError(f"a video needs at least {self.temporal_patch_size} frames, got {num_frames}")
        if height < 1 or width < 1:
            raise ValueError(f"a frame needs at least one pixel, got {width}x{height}")
        factor = self.patch_size * self.merge_size
        max_pixels = self.max_pixels
        if self.max_frame_tokens is not None:
            share = min(self.max_frame_tokens * factor**2, max_pixels // num_frames)
            max_pixels = max(share, int(self.min_pixels * FLOOR_MARGIN)) * num_frames
        if height < factor or width < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        check_aspect_ratio(height, width, "a video")
        counted = round(num_frames / self.temporal_patch_size) * self.temporal_patch_size  # the reference rounds half to even
        new_height, new_width = rounded_size(height, width, factor, self.min_pixels, max_pixels, num_frames, counted)
        pairs = -(-num_frames // self.temporal_patch_size)
        return pairs, new_height // self.patch_size, new_width // self.patch_size

    def pair_times(self, times: Sequence[float]) -> list[float]:
        """Return the time of each pair in seconds: the mean of its two frames. An odd last frame is repeated."""
        size = self.temporal_patch_size
        padded = [*times, *[times[-1]] * (-len(times) % size)]
        return [(padded[i] + padded[i + size - 1]) / 2 for i in range(0, len(padded), size)]


def time_text(seconds: float) -> str:
    return f"<{seconds:.1f} seconds>"
