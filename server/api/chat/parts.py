"""Messages of chat completions and their parts, as strict types."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from server.api.chat.tools import CALLS, CustomCall, ToolCall
from server.http.validate import OneOf, Open, Strict

LOW_DETAIL_PIXELS = 512 * 512
MAX_TOOLS = 1024

# Lists that a client may fill with very many bad values fail at the first one.
FIRST = Field(fail_fast=True)
ToolList = Field(max_length=MAX_TOOLS, fail_fast=True)
Pixels = Annotated[int, Field(ge=1, lt=1 << 31)]


class PixelLimits(Strict):
    """The area of an image after resizing; None is the checkpoint's own limit."""

    min_pixels: Pixels | None = None
    max_pixels: Pixels | None = None


class ProcessorKwargs(PixelLimits):
    """For all images of a request. What else there may be for other models is refused."""

    model_config = ConfigDict(extra="forbid")


class ImageUrl(PixelLimits, Open):
    """Where the image is. What clients add is tolerated if it changes nothing: see LIMITED_IN_IMAGES.

    `detail: low` is at most LOW_DETAIL_PIXELS, `high` and `auto` are as the checkpoint has it."""

    url: str | None
    detail: Literal["auto", "low", "high"] | None = None


class TextPart(Strict):
    type: Literal["text", "input_text"]
    text: str


class RefusalPart(Strict):
    """Of an assistant's message in a history."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


def _url_object(value: object) -> object:
    return {"url": value} if isinstance(value, str | None) else value


class ImagePart(PixelLimits, Open):
    """With a `uuid`, the URL may be null the next time."""

    type: Literal["image_url", "input_image"]
    image_url: Annotated[ImageUrl, BeforeValidator(_url_object, json_schema_input_type=ImageUrl | str | None)]
    uuid: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    def limits(self, others: PixelLimits) -> tuple[int | None, int | None, int | None]:
        """Least and most pixels: what stands nearest to the image counts, `others` last. And what low detail bounds it by besides."""
        told = (self.image_url, self, others)
        least = next((one.min_pixels for one in told if one.min_pixels is not None), None)
        most = next((one.max_pixels for one in told if one.max_pixels is not None), None)
        return least, most, LOW_DETAIL_PIXELS if self.image_url.detail == "low" else None


Part = Annotated[TextPart | RefusalPart | ImagePart, OneOf("content parts are of type 'text' or 'image_url'")]
Parts = Annotated[list[Part], FIRST]


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[Parts | str | None, OneOf("must be a string or a list of parts")] = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Annotated[ToolCall | CustomCall, OneOf(CALLS)]], ToolList] | None = None
    tool_call_id: str | None = None
    function_call: None = None

    @model_validator(mode="after")
    def _needs_content(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self
