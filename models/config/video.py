"""Reader of a checkpoint's settings of videos. Imports no torch."""

from pathlib import Path

from models.config.huggingface import pixel_limits, read_json
from models.media.geometry import VisionGeometry
from models.media.video import VideoGeometry

# Values of the published checkpoints, for folders without video_preprocessor_config.json.
DEFAULT_MIN_PIXELS = 4_096
DEFAULT_MAX_PIXELS = 25_165_824


def read_video_geometry(folder: Path, images: VisionGeometry) -> VideoGeometry:
    """Read video_preprocessor_config.json or the equivalent part of processor_config.json. Patches are those of images."""
    settings = read_json(folder / "processor_config.json").get("video_processor") or read_json(folder / "video_preprocessor_config.json")
    least, most = pixel_limits(settings, DEFAULT_MIN_PIXELS, DEFAULT_MAX_PIXELS)
    return VideoGeometry(
        images.patch_size, images.merge_size, images.temporal_patch_size, least, most,
        **{name: settings[name] for name in ("fps", "min_frames", "max_frames", "num_frames") if name in settings},
        samples=settings.get("do_sample_frames", True),
        max_frame_tokens=settings.get("max_video_tokens", 768) if settings.get("cap_pixels_per_frame") else None,
    )  # fmt: skip
