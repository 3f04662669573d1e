"""Videos in the content of messages, and their options."""

from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from engine.wire.messages import MediaRef, VideoRef
from server.api.schema.media import NO_URL, MediaRefs, PixelLimits, Uuid, check_extra, url_object
from server.api.schema.validate import Open, Strict, bad_value

JOINED_TYPE, JOINED_FPS = "video/jpeg", 1.0  # vLLM's format: images separated by commas, and their default rate
MAX_FRAMES = 4096  # limit per video

Rate = Annotated[float, Field(gt=0, le=1000)]
FrameCount = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
FrameNumber = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(ge=0, le=1e7)]
FrameNumbers = Annotated[list[FrameNumber], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)]
FrameTimes = Annotated[list[Seconds], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)]

RATES = frozenset({"fps", "num_frames"})


class VideoOptions(PixelLimits):
    """Sampling of a video's frames, `fps` per second or `num_frames` in all, and their size."""

    alternatives = RATES

    fps: Rate | None = None
    num_frames: FrameCount | None = None
    min_frames: FrameCount | None = None
    max_frames: FrameCount | None = None
    max_tokens_per_frame: Annotated[int, Field(ge=1, lt=1 << 20)] | None = None
    do_sample_frames: bool | None = None

    @model_validator(mode="after")
    def _one_way(self) -> "VideoOptions":
        if self.fps is not None and self.num_frames is not None:
            raise ValueError("takes `fps` or `num_frames`, not both")
        return self


class VideoIo(Strict):
    """vLLM's options: the frames to read of a file, or the origin of given frames. `num_frames` -1 reads all."""

    model_config = ConfigDict(extra="forbid")

    num_frames: Literal[-1] | FrameCount | None = None
    fps: Annotated[float, Field(ge=-1, le=1000)] | None = None
    do_sample_frames: bool | None = None
    frames_indices: FrameNumbers | None = None
    total_num_frames: FrameNumber | None = None
    duration: Seconds | None = None


class MediaIoKwargs(Strict):
    model_config = ConfigDict(extra="forbid")

    video: VideoIo | None = None


class VideoUrl(VideoOptions, Open):
    """Location of a video: a file, or `data:video/jpeg;base64,` with frames separated by commas."""

    url: str | None


class FrameOptions(VideoOptions, Open):
    """Options of a list of frames: `fps` is the rate of their source, `frames_indices` are their numbers in it; `timestamps`, in seconds,
    replace both."""

    frames_indices: FrameNumbers | None = None
    timestamps: FrameTimes | None = None
    uuid: Uuid | None = None


class VideoPart(FrameOptions):
    """A video. Later requests with the same `uuid` may leave out the URL."""

    type: Literal["video_url", "input_video"]
    video_url: Annotated[VideoUrl, BeforeValidator(url_object, json_schema_input_type=VideoUrl | str | None)] = NO_URL


class FramesPart(FrameOptions):
    """A video as a list of the URLs of its frames, or as the URL of a file."""

    type: Literal["video"]
    video: Annotated[list[str], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)] | str


def reference(part: VideoPart | FramesPart, name: str, refs: MediaRefs, limits: VideoOptions, io: MediaIoKwargs | None) -> VideoRef:
    """Return the reference for the processor. Options next to the URL take precedence, then the part's, then `limits`, then `io`."""
    sources, video_io = [part, limits], (io and io.video) or VideoIo()
    if isinstance(part, FramesPart):
        check_extra(part, part, f"{name}.video")
        if isinstance(part.video, list):
            frames = [refs.of(url, None, f"{name}.video.{i}") for i, url in enumerate(part.video)]
            return _frames(part, name, sources, video_io, VideoRef(frames=frames))
        url: str | None = part.video
        file = refs.of(url, part.uuid, f"{name}.video")
    else:
        sources.insert(0, part.video_url)
        check_extra(part, part.video_url, f"{name}.video_url")
        url = part.video_url.url
        file = refs.of(url, part.uuid, f"{name}.video_url", ".url")
    if refs.has_type(url or "", JOINED_TYPE):
        return _frames(part, name, sources, video_io, VideoRef(file=file, holds_frames=True, source_fps=JOINED_FPS))
    for field, values in (("frames_indices", part.frames_indices), ("timestamps", part.timestamps)):
        if values is not None:
            raise bad_value(f"{name}.{field}", "is only supported for a list of frames")
    return _sampled(sources, file, video_io)


def _sampled(sources: list[VideoOptions], file: MediaRef, io: VideoIo) -> VideoRef:
    options = VideoOptions.merged(*sources)
    if not options.keys() & RATES:
        options |= {"num_frames": io.num_frames} if (io.num_frames or 0) > 0 else {"fps": io.fps} if (io.fps or 0) > 0 else {}
    samples = options.pop("do_sample_frames", io.do_sample_frames)
    if io.num_frames == -1 and samples is None and not options.keys() & RATES:
        samples = False
    return VideoRef(file=file, samples=samples, max_frame_tokens=options.pop("max_tokens_per_frame", None), **options)


def _frames(part: FrameOptions, name: str, sources: list[VideoOptions], io: VideoIo, ref: VideoRef) -> VideoRef:
    if any(one.do_sample_frames for one in sources) or io.do_sample_frames:
        raise bad_value(f"{name}.do_sample_frames", "may only be false for a list of frames, all of which are used")
    if part.frames_indices is not None and part.timestamps is not None:
        raise bad_value(f"{name}.timestamps", "excludes `frames_indices`")
    for field, values in (("timestamps", part.timestamps), ("frames_indices", part.frames_indices)):
        if values is not None and values != sorted(values):
            raise bad_value(f"{name}.{field}", "must be in ascending order")
    options, io_fps = VideoOptions.merged(*sources), io.fps if (io.fps or 0) > 0 else None
    return msgspec.structs.replace(
        ref, source_fps=VideoOptions.merged(*sources[:-1]).get("fps") or io_fps or ref.source_fps, times=part.timestamps, samples=False,
        indices=io.frames_indices if part.frames_indices is None else part.frames_indices,
        min_pixels=options.get("min_pixels"), max_pixels=options.get("max_pixels"),
        max_frame_tokens=options.get("max_tokens_per_frame"),
    )  # fmt: skip
