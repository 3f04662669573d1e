"""Messages between the processor and decoders of videos."""

import functools

import msgspec

from server.errors import RequestError

invalid_video = functools.partial(RequestError, 422, code="invalid_video")


class VideoLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits: pixels per frame, frames per file, memory of a decoder in bytes, and its threads; as many threads resize its frames."""

    frame_pixels: int
    file_frames: int
    memory: int
    threads: int


class VideoJob(msgspec.Struct, frozen=True, array_like=True):
    """Write the frames `wanted` (ascending indices) to `target`, resized to `size` (height, width). If `wanted` is empty, only inspect the
    file."""

    encoded: tuple[int, int]  # offset, length
    wanted: list[int] = []
    target: int = 0  # offset
    size: tuple[int, int] = (0, 0)


class Clip(msgspec.Struct, frozen=True, array_like=True):
    """Number of frames in a file, their rate if the file states it, and the size of the first frame, upright."""

    num_frames: int
    fps: float | None
    height: int
    width: int
