"""Messages between the processor and decoders of videos."""

import functools

import msgspec

from engine.wire.messages import ErrorInfo
from server.errors import RequestError

invalid_video = functools.partial(RequestError, 422, code="invalid_video")


class VideoLimits(msgspec.Struct, frozen=True, array_like=True):
    """`frame_pixels` of one frame, `file_frames` in a file; `memory` in bytes and `threads` of one decoder, and as
    many threads that resize what it decodes."""

    frame_pixels: int
    file_frames: int
    memory: int
    threads: int


class VideoJob(msgspec.Struct, frozen=True, array_like=True):
    """Frames `wanted`, ascending and an even number, go to `room` with `size` (height, width); without them, the file is only looked at.
    `parameters` are part of each pair's hash."""

    encoded: tuple[int, int]  # offset, length
    wanted: list[int] = []
    room: tuple[int, int] = (0, 0)
    size: tuple[int, int] = (0, 0)
    parameters: bytes = b""


class Clip(msgspec.Struct, frozen=True, array_like=True):
    """Frames in a file, their rate if it tells, and the size of the first one, upright."""

    num_frames: int
    fps: float | None
    height: int
    width: int


class VideoAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Result of an inspection or of a job with `wanted` (one hash per pair), or the error."""

    clip: Clip | None = None
    hashes: list[bytes] = []
    error: ErrorInfo | None = None
