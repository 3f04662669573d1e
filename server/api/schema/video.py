"""Videos in the content of messages, and their options."""

from typing import Annotated, Literal

import msgspec
from pydantic import BeforeValidator, Field

from engine.wire.messages import VideoRef
from server.api.schema.media import NO_URL, MediaRefs, PixelLimits, Uuid, url_object
from server.api.schema.validate import bad_value

JOINED_TYPE, JOINED_FPS = "video/jpeg", 1.0  # vLLM's format: images separated by commas, and their default rate
MAX_FRAMES = 4096  # limit per video


class VideoOptions(PixelLimits):
    """Sampling of a video's frames, `fps` per second or `num_frames` in all, and their size. With `do_sample_frames` false, all frames are
    used."""

    fps: Annotated[float, Field(gt=0, le=1000)] | None = None
    num_frames: Annotated[int, Field(ge=1, le=MAX_FRAMES)] | None = None
    do_sample_frames: bool | None = None


class VideoUrl(VideoOptions):
    """Location of a video: a file, or `data:video/jpeg;base64,` with frames separated by commas."""

    url: str | None = None


class VideoPart(VideoOptions):
    """A video. Later requests with the same `uuid` may leave out the URL."""

    type: Literal["video_url", "input_video"]
    video_url: Annotated[VideoUrl, BeforeValidator(url_object, json_schema_input_type=VideoUrl | str | None)] = NO_URL
    uuid: Uuid | None = None


class FramesPart(VideoOptions):
    """A video as a list of the URLs of its frames, taken at `fps`, or as the URL of a file."""

    type: Literal["video"]
    video: Annotated[list[str], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)] | str
    uuid: Uuid | None = None


def video_reference(part: VideoPart | FramesPart, name: str, refs: MediaRefs, limits: VideoOptions) -> VideoRef:
    """Return the reference for the processor. Options next to the URL take precedence, then the part's, then `limits`."""
    own: list[VideoOptions] = [part]
    if isinstance(part, FramesPart):
        if isinstance(part.video, list):
            frames = [refs.of(url, None, f"{name}.video.{i}") for i, url in enumerate(part.video)]
            return _of_frames(VideoRef(frames=frames), own, limits)
        url: str | None = part.video
        file = refs.of(url, part.uuid, f"{name}.video")
    else:
        own.insert(0, part.video_url)
        url = part.video_url.url
        file = refs.of(url, part.uuid, f"{name}.video_url", ".url")
    if refs.has_type(url or "", JOINED_TYPE):
        return _of_frames(VideoRef(file=file, holds_frames=True, fps=JOINED_FPS), own, limits)
    options = VideoOptions.merged(*own, limits)
    if options.keys() >= {"fps", "num_frames"}:
        raise bad_value(name, "a video takes `fps` or `num_frames`, not both")
    return VideoRef(file=file, samples=options.pop("do_sample_frames", None), **options)


def _of_frames(ref: VideoRef, own: list[VideoOptions], limits: VideoOptions) -> VideoRef:
    """Return the reference to given frames, all of which are used. A rate for the whole request is not theirs."""
    sizes = PixelLimits.merged(*own, limits)
    return msgspec.structs.replace(ref, fps=VideoOptions.merged(*own).get("fps", ref.fps), **sizes)
