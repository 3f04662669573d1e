"""Locations and options of a request's media. Part of the messages."""

import msgspec


class Region(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`length` bytes at `offset` of a shared-memory arena."""

    arena: int
    offset: int
    length: int


class MediaRef(msgspec.Struct, tag=True, frozen=True):
    """One image of a request: base64 text in the api arena, with JSON escapes; a URL; or an image that this client has sent under `name`.
    `min_pixels` and `max_pixels` limit its area; None: the checkpoint's limits."""

    payload: Region | None = None
    url: str | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    name: bytes | None = None
    cap: int | None = None  # maximum pixels, in addition to the other limits


class VideoRef(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One video of a request: a file, or its frames in order. None: the value of the checkpoint or of the file."""

    file: MediaRef | None = None
    holds_frames: bool = False  # the file is a list of images separated by commas
    frames: list[MediaRef] = []
    fps: float | None = None  # at which frames are sampled from a file, or at which given frames were taken
    num_frames: int | None = None  # number of frames sampled from a file, whatever the rate
    samples: bool | None = None  # False: all frames of a file are used
    min_pixels: int | None = None  # sum over all frames
    max_pixels: int | None = None
