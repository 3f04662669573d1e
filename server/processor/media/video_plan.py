"""Selection of a video's frames, their size and number of tokens."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.wire.config import EngineConfig
from engine.wire.messages import VideoRef
from models.config.video import read_video_geometry
from models.media.geometry import Grid
from models.media.video import VideoGeometry
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.decoders import Size
from server.processor.media.inspect import PROCESSING_VERSION, Inspector
from server.processor.media.pixels import framed_hash

PAIR = 2  # frames of an item


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """Selected frames (an even number), their size, the grid and the number of tokens per pair, and the time of each pair."""

    indices: list[int]
    size: Size  # of a frame
    grid: Grid
    num_tokens: int
    times: list[float]

    @property
    def pair_bytes(self) -> int:
        return PAIR * 3 * self.size[0] * self.size[1]


class VideoPlanner:
    """Limits and geometry of videos. Immutable."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, inspector: Inspector):
        self.inspector = inspector
        self.takes_videos = "video" in checkpoint.model.placeholder_ids
        self._usual, self._max_frames = read_video_geometry(checkpoint.folder, checkpoint.model.geometry), config.max_video_frames
        self.max_bytes = config.max_video_bytes
        sizes = inspector.geometry.patch_size, inspector.geometry.merge_size, inspector.geometry.temporal_patch_size
        self._parameters = msgspec.msgpack.encode((PROCESSING_VERSION, *sizes))

    def geometry_of(self, ref: VideoRef) -> VideoGeometry:
        """Return the checkpoint's geometry with the request's limits; a rate replaces a number of frames. RequestError 400."""
        usual = self._usual
        least = ref.min_pixels or min(usual.min_pixels, ref.max_pixels or usual.min_pixels)
        most = ref.max_pixels or max(usual.max_pixels, least)
        if least > most:
            raise RequestError(400, f"its min_pixels of {least} exceed its max_pixels of {most}", code="invalid_value")
        names = ("fps", "min_frames", "max_frames", "samples", "max_frame_tokens", "num_frames")
        changes: dict[str, Any] = {name: value for name in names if (value := getattr(ref, name)) is not None}
        if ref.fps is not None:
            changes["num_frames"] = None
        return dataclasses.replace(usual, min_pixels=least, max_pixels=most, **changes)

    def identity(self, size: Size, *sources: bytes) -> bytes:
        """Return the hash of a pair of frames of this size from these sources."""
        return framed_hash(b"pair", self._parameters, b"%dx%d" % size, *sources)

    def check_frames(self, num_frames: int) -> None:
        """Raise RequestError 400 for too many frames."""
        if num_frames > self._max_frames:
            words = f"{num_frames} of its frames would be sampled, the limit is {self._max_frames}: lower fps or num_frames"
            raise RequestError(400, words, code="video_too_large")

    def plan(self, video: VideoGeometry, indices: list[int], times: list[float], size: tuple[int, int]) -> VideoPlan:
        """Return the plan for these frames of this size (height, width). RequestError 400 for an unsupported shape, or for too many frames
        or tokens."""
        num_frames, most = len(indices), self.inspector.max_tokens
        self.check_frames(num_frames)
        try:
            _, rows, columns = video.grid(num_frames, *size)
        except ValueError as error:
            raise RequestError(400, str(error), code="invalid_video") from None
        num_tokens = self.inspector.geometry.num_tokens((1, rows, columns))
        if num_tokens > most:
            raise RequestError(400, f"a pair of its frames takes {num_tokens} tokens, the limit is {most}", code="video_too_large")
        return VideoPlan(
            indices=[*indices, *[indices[-1]] * (num_frames % PAIR)], size=(rows * video.patch_size, columns * video.patch_size),
            grid=(1, rows, columns), num_tokens=num_tokens, times=video.pair_times(times),
        )  # fmt: skip
