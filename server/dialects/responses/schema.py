"""What requests and answers of OpenAI's newer dialect hold."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from engine.wire.params import Temperature, TokenCount, TopP
from server.http.validate import OneOf, Open, Strict, Worded
from server.openai.media import PixelLimits, VideoOptions
from server.openai.parts import FIRST, RefusalPart, ToolList
from server.openai.schema import Effort, MessageList, Verbosity
from server.openai.tools import FunctionDefinition, HostedTool, Name


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
Content = Annotated[Annotated[list[InputPart], FIRST] | str, OneOf("must be a string or a list of parts")]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Strict):
    """What the assistant has called."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(Strict):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class ResultItem(Strict):
    type: Literal["function_call_output", "custom_tool_call_output"]
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
    MessageItem | CallItem | CustomCallItem | ResultItem | ThoughtItem,
    OneOf("items are of type 'message', 'reasoning', or 'function_call', 'custom_tool_call' and their outputs"),
]


class FunctionTool(FunctionDefinition):
    """One of the client's own; those that OpenAI runs are of other types, and dropped."""

    type: Literal["function"]

    def functions(self) -> list[dict[str, Any]]:
        """As chat completions have it."""
        return [{"type": "function", "function": self.model_dump(exclude={"type"})}]


class FlatShape(Strict):
    """Beside `grammar`, its syntax and definition."""

    type: Literal["text", "grammar"]
    syntax: str | None = None
    definition: str | None = None


class FlatCustomTool(Strict):
    """It takes one text."""

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: FlatShape | None = None

    def functions(self) -> list[dict[str, Any]]:
        custom = self.model_dump(exclude={"type", "format"})
        if self.format is not None and self.format.type == "grammar":
            grammar = {"syntax": self.format.syntax, "definition": self.format.definition}
            custom["format"] = {"type": "grammar", "grammar": grammar}
        return [{"type": "custom", "custom": custom}]


class Namespace(Strict):
    """Functions that belong together, such as those of an MCP server that the client runs."""

    type: Literal["namespace"]
    name: Name
    tools: Annotated[list[Annotated[FunctionTool | HostedTool, OneOf()]], ToolList]

    def functions(self) -> list[dict[str, Any]]:
        """The model sees both names in one."""
        own = [tool.functions()[0] for tool in self.tools if isinstance(tool, FunctionTool)]
        return [tool | {"function": tool["function"] | {"name": joined(self.name, tool["function"]["name"])}} for tool in own]


def joined(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}__{name}"


class ChosenTool(Strict):
    """Its name stands there without an object around it."""

    type: Literal["function", "custom"]
    name: str


class TextFormat(Strict):
    """`name`, `description` and `strict` add nothing: a schema is always held."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = Field(alias="schema", default=None)


class TextOptions(Strict):
    format: TextFormat | None = None
    verbosity: Verbosity | None = None


class Reasoning(Strict):
    """Thoughts are never summed up."""

    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


AnyTool = Annotated[FunctionTool | FlatCustomTool | Namespace | HostedTool, OneOf("must be an object with a `type`")]
CHOICES = "must be 'none', 'auto', 'required' or {\"type\": \"function\", \"name\": ...}"


Include = Literal[  # none of which there is
    "reasoning.encrypted_content", "web_search_call.action.sources", "web_search_call.results", "file_search_call.results",
    "code_interpreter_call.outputs", "computer_call_output.output.image_url", "message.input_image.image_url",
]  # fmt: skip


class ResponsesRequest(Open):
    """The body of `POST /v1/responses`."""

    model: str | None = None
    input: Annotated[Annotated[list[Item], MessageList] | str, OneOf()]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    tools: Annotated[list[AnyTool], ToolList] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ChosenTool | None, Worded(CHOICES)] = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Include] | None = None
    metadata: dict[str, Any] | None = None


class OutputItem(BaseModel):
    """Thoughts, a message or a call, as its `type` says."""

    id: str
    type: Literal["reasoning", "message", "function_call", "custom_tool_call"]
    status: Literal["in_progress", "completed", "incomplete"]
    role: Literal["assistant"] | None = None
    content: list[dict[str, Any]] | None = None
    summary: list[str] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None


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
    previous_response_id: None = None
    store: Literal[False]
    error: dict[str, str] | None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    tools: list[AnyTool]
    tool_choice: str | ChosenTool
    parallel_tool_calls: bool
    text: dict[str, Any]
    reasoning: dict[str, Any] | None
    metadata: dict[str, Any]
    timings: dict[str, float] | None = None
    warnings: list[str] | None = None


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
    input: str | None = None
    code: str | None = None
    message: str | None = None
    param: str | None = None


class TokensCounted(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int
