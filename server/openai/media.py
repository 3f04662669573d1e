"""Images and videos in the content of messages, and what a request says of all of them."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from server.http.validate import OneOf, Open, Strict

LOW_DETAIL_PIXELS = 512 * 512
MAX_FRAMES = 4096  # of one video

Detail = Literal["auto", "low", "high", "original"]
Pixels = Annotated[int, Field(ge=1, lt=1 << 31)]
Rate = Annotated[float, Field(gt=0, le=1000)]
FrameCount = Annotated[int, Field(ge=1, le=MAX_FRAMES)]
FrameNumber = Annotated[int, Field(ge=0, lt=1 << 31)]
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Uuid = Annotated[str, Field(min_length=1, max_length=1024)]
FrameNumbers = Annotated[list[FrameNumber], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)]
FrameTimes = Annotated[list[Seconds], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)]


class PixelLimits(Strict):
    """Limits on the area after resizing, for videos on the sum over all frames; None is the checkpoint's limit."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


class VideoOptions(PixelLimits):
    """Sampling of a video's frames, `fps` per second or `num_frames` in all, and their size."""

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


class PixelSizes(Strict):
    """transformers' names of `min_pixels` and `max_pixels`."""

    model_config = ConfigDict(extra="forbid")

    shortest_edge: Pixels | None = None
    longest_edge: Pixels | None = None


class ProcessorKwargs(VideoOptions):
    """Options of all images and videos of a request. Options of other models are rejected."""

    model_config = ConfigDict(extra="forbid")

    size: PixelSizes | None = None

    @model_validator(mode="after")
    def _sizes(self) -> "ProcessorKwargs":
        if self.size is not None:
            self.min_pixels = self.min_pixels or self.size.shortest_edge
            self.max_pixels = self.max_pixels or self.size.longest_edge
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
    """Options of all videos of a request."""

    model_config = ConfigDict(extra="forbid")

    video: VideoIo | None = None


class ImageUrl(PixelLimits, Open):
    """Location of an image. Further members are accepted if they change nothing: see LIMITED_IN_IMAGES.

    `detail: low` is at most LOW_DETAIL_PIXELS, `high` and `auto` are as the checkpoint has it."""

    url: str | None
    detail: Detail | None = None


class VideoUrl(VideoOptions, Open):
    """Location of a video: a file, or `data:video/jpeg;base64,` with frames separated by commas."""

    url: str | None


def _url_object(value: object) -> object:
    return {"url": value} if isinstance(value, str | None) else value


NO_URL: Any = Field(default=None, validate_default=True)


RATES = {"fps", "num_frames"}  # of which one counts


def merged(options: Sequence[PixelLimits]) -> dict[str, Any]:
    """Return what the options say together; the first of them that says something takes precedence."""
    told: dict[str, Any] = {}
    for one in reversed(options):
        said = {name: value for name, value in one if name in VideoOptions.model_fields and value is not None}
        told = {name: value for name, value in told.items() if not (said.keys() & RATES and name in RATES)} | said
    return told


class ImagePart(PixelLimits, Open):
    """An image. Later requests with the same `uuid` may leave out the URL."""

    type: Literal["image_url", "input_image"]
    image_url: Annotated[ImageUrl, BeforeValidator(_url_object, json_schema_input_type=ImageUrl | str | None)] = NO_URL
    detail: Detail | None = None  # as Responses have it
    uuid: Uuid | None = None

    def limits(self, others: PixelLimits) -> tuple[int | None, int | None, int | None]:
        """Return the least and most pixels, and the cap of low detail. Limits beside the URL come first, then the part's, then `others`."""
        told, is_low = merged((self.image_url, self, others)), "low" in (self.image_url.detail, self.detail)
        return told.get("min_pixels"), told.get("max_pixels"), LOW_DETAIL_PIXELS if is_low else None


class FrameOptions(VideoOptions, Open):
    """Options of frames that are sent one by one: `fps` is the rate of their source, `frames_indices` are their numbers in it;
    `timestamps`, in seconds, replace both."""

    frames_indices: FrameNumbers | None = None
    timestamps: FrameTimes | None = None
    uuid: Uuid | None = None


class VideoPart(FrameOptions):
    """A video. Later requests with the same `uuid` may leave out the URL."""

    type: Literal["video_url", "input_video"]
    video_url: Annotated[VideoUrl, BeforeValidator(_url_object, json_schema_input_type=VideoUrl | str | None)] = NO_URL


class FramesPart(FrameOptions):
    """A video as a list of the URLs of its frames, or as the URL of a file."""

    type: Literal["video"]
    video: Annotated[Annotated[list[str], Field(min_length=1, max_length=MAX_FRAMES, fail_fast=True)] | str, OneOf()]
