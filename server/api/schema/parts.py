"""Messages of chat completions, their parts, tools and calls, as strict types."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from server.api.schema.media import ImagePart, PixelSizes
from server.api.schema.validate import BY_TYPE, Open, Strict
from server.api.schema.video import FramesPart, VideoOptions, VideoPart

MAX_TOOLS = 1024

# Validation of long lists stops at the first error.
FIRST = Field(fail_fast=True)
ToolList = Field(max_length=MAX_TOOLS, fail_fast=True)
Name = Annotated[str, Field(min_length=1, max_length=256)]


def check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a function's parameters. Raises ValueError for one whose `properties` are no schemas."""
    properties = schema.get("properties")
    if properties is not None and not (isinstance(properties, dict) and all(isinstance(one, dict | bool) for one in properties.values())):
        raise ValueError("`properties` must be an object of schemas")
    return schema


Parameters = Annotated[dict[str, Any], AfterValidator(check_parameters)]


class CalledFunction(Strict):
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class FunctionDefinition(Strict):
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


def client_tools(kind: Any, *types: str | None) -> BeforeValidator:
    """Annotation of a list of tools of this kind: those of other types, which vendors run for their own models, are dropped."""

    def kept(tools: Any) -> Any:
        return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type") in types] if isinstance(tools, list) else tools

    return BeforeValidator(kept, json_schema_input_type=list[kind | dict[str, Any]])


class FunctionName(Strict):
    name: str


class NamedTool(Strict):
    type: Literal["function"] = "function"
    function: FunctionName


class TextPart(Strict):
    type: Literal["text", "input_text", "output_text", "reasoning_text"]
    text: str


class RefusalPart(Strict):
    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class ProcessorKwargs(VideoOptions):
    """Options of all media of a request. Options of other models are rejected."""

    model_config = ConfigDict(extra="forbid")

    size: PixelSizes | None = None

    @model_validator(mode="after")
    def _sizes(self) -> "ProcessorKwargs":
        if self.size is not None:
            self.min_pixels = self.min_pixels or self.size.shortest_edge
            self.max_pixels = self.max_pixels or self.size.longest_edge
        return self


class MediaOptions(Open):
    mm_processor_kwargs: ProcessorKwargs | None = None


def _usual(part: object) -> object:
    """Convert `image` parts of the Python API and `file` parts with data to `image_url` parts."""
    if isinstance(part, dict) and part.get("type") == "image":
        return {**part, "type": "image_url", "image_url": part.get("image_url") or part.get("image") or part.get("url")}
    file = part.get("file") if isinstance(part, dict) and part.get("type") == "file" else None
    return {"type": "image_url", "image_url": file["file_data"]} if isinstance(file, dict) and file.get("file_data") else part


Part = Annotated[TextPart | RefusalPart | ImagePart | VideoPart | FramesPart, BY_TYPE, BeforeValidator(_usual)]
Content = Annotated[list[Part], FIRST] | str


class Message(Strict):
    role: Annotated[str, Field(min_length=1, max_length=64)]  # the template decides which roles it supports
    content: Content | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], ToolList] | None = None
    tool_call_id: str | None = None
    function_call: None = None

    @model_validator(mode="after")
    def _needs_content(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self
