"""What requests and answers of OpenAI's newer dialect hold."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from server.api.chat.media import PixelLimits, VideoOptions
from server.api.chat.schema import FIRST, FunctionDefinition, MessageList, RefusalPart, Temperature, TokenCount, ToolList, TopP
from server.http.validate import OneOf, Open, Strict, Worded


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(PixelLimits):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


class InputVideo(VideoOptions):
    """No part of OpenAI's dialect."""

    type: Literal["input_video"]
    video_url: str


InputPart = Annotated[
    InputText | RefusalPart | InputImage | InputVideo,
    OneOf("parts are of type 'input_text', 'input_image', 'input_video' or 'output_text'"),
]
Content = Annotated[Annotated[list[InputPart], FIRST] | str, OneOf()]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Strict):
    """What the assistant has called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResultItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ThoughtPart(Strict):
    type: Literal["reasoning_text", "text"]
    text: str


class ThoughtItem(Strict):
    """Thoughts of a history; what is encrypted is none of ours."""

    type: Literal["reasoning"]
    content: Annotated[list[ThoughtPart], FIRST] | None = None


Item = Annotated[
    MessageItem | CallItem | ResultItem | ThoughtItem,
    OneOf("items are of type 'message', 'function_call', 'function_call_output' or 'reasoning'; nothing else is stored"),
]


class FunctionTool(FunctionDefinition):
    """One of the client's own; those that OpenAI runs are of other types."""

    type: Literal["function"]


class ChosenTool(Strict):
    """Its name stands there without an object around it."""

    type: Literal["function"]
    name: str


class TextFormat(Strict):
    """`name`, `description` and `strict` add nothing: a schema is always held."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(alias="schema", default=None)


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None  # the default


class Reasoning(Strict):
    """`none` turns thoughts off where the template has a switch; they are never summed up."""

    effort: Literal["none", "medium"] | None = None
    summary: Literal["auto"] | None = None


CHOICES = "must be 'none', 'auto', 'required' or {\"type\": \"function\", \"name\": ...}"


class ResponsesRequest(Open):
    """The body of `POST /v1/responses`."""

    model: str | None = None
    input: Annotated[Annotated[list[Item], MessageList] | str, OneOf()]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Annotated[list[FunctionTool], ToolList] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ChosenTool | None, Worded(CHOICES)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # of which there is nothing
    metadata: dict[str, Any] | None = None


class OutputItem(BaseModel):
    """Thoughts, a message or a call, as its `type` says."""

    id: str
    type: Literal["reasoning", "message", "function_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[dict[str, Any]] | None = None
    summary: list[str] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class ResponseUsage(BaseModel):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class ResponseAnswer(BaseModel):
    """Beside these it repeats what its request says."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None = None
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutputItem]
    usage: ResponseUsage | None
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[FunctionTool]
    tool_choice: str | ChosenTool
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any] | None
    metadata: dict[str, Any]
    timings: dict[str, float] | None = None


class ResponseEvent(BaseModel):
    """One event's data; its `type` says which members there are."""

    type: str
    sequence_number: int
    response: ResponseAnswer | None = None
    item: OutputItem | None = None
    item_id: str | None = None
    output_index: int | None = None
    content_index: int | None = None
    part: dict[str, Any] | None = None
    delta: str | None = None
    text: str | None = None
    name: str | None = None
    arguments: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None
