"""Location and options of a video. Part of the messages."""

import msgspec

from engine.wire.media import MediaRef


class VideoRef(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One video of a request: a file, or its frames in order. None: the value of the checkpoint or of the file."""

    file: MediaRef | None = None
    holds_frames: bool = False  # the file is a list of images separated by commas
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
