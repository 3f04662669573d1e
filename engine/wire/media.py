"""Locations and options of a request's images and videos. Part of the messages."""

import msgspec


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` bytes at `offset` of a shared-memory arena."""

    arena: int
    offset: int
    length: int


class MediaRef(msgspec.Struct, tag=True, frozen=True):
    """One image of a request: base64 text in the api arena, with JSON escapes, a URL, or the one that this client sent under `name`.
    `min_pixels` and `max_pixels` bound its area; None: as the checkpoint."""

    payload: Region | None = None
    url: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    name: bytes | None = None
    cap: int | None = None  # most pixels, whatever the others say


class VideoRef(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One video of a request: a file, or its frames in their order. None: as the checkpoint, or as the file tells."""

    file: MediaRef | None = None
    holds_frames: bool = False  # it is images with commas between
    frames: list[MediaRef] = []
    fps: float | None = None  # at which frames are chosen from a file
    num_frames: int | None = None  # number of frames, whatever the rate
    min_frames: int | None = None
    max_frames: int | None = None
    samples: bool | None = None  # False: all frames are used
    min_pixels: int | None = None  # sum over all frames
    max_pixels: int | None = None
    max_frame_tokens: int | None = None
    source_fps: float | None = None  # of the frames' source video
    indices: list[int] | None = None  # frame numbers in that video
    times: list[float] | None = None  # times of frames in seconds
