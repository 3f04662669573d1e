"""What requests and answers of Anthropic's dialect hold."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from engine.wire.params import NotEmpty, Temperature, TokenCount, TopK, TopP
from server.http.validate import OneOf, Open, Strict
from server.openai.parts import FIRST, ToolList
from server.openai.schema import MAX_STOPS, Effort, MessageList
from server.openai.tools import HostedTool, Name


class TextBlock(Strict):
    type: Literal["text"]
    text: str


class Base64Source(Strict):
    type: Literal["base64"]
    media_type: str
    data: str


class UrlSource(Strict):
    type: Literal["url"]
    url: str


class ImageBlock(Strict):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, OneOf("must be of type 'base64' or 'url'")]


class VideoBlock(Strict):
    """No block of Anthropic's dialect, but in its manner."""

    type: Literal["video"]
    source: Annotated[Base64Source | UrlSource, OneOf("must be of type 'base64' or 'url'")]


class ThinkingBlock(Strict):
    """Thoughts of a history; a signature is none of ours."""

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(Strict):
    """Thoughts that nobody can read."""

    type: Literal["redacted_thinking"]


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ResultBlock = Annotated[TextBlock | ImageBlock | VideoBlock, OneOf("blocks of a result are of type 'text', 'image' or 'video'")]


class ToolResultBlock(Strict):
    """What a tool said. `is_error` adds nothing that templates could show: the content says it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[Annotated[list[ResultBlock], FIRST] | str | None, OneOf()] = None
    is_error: bool | None = None


Block = Annotated[
    TextBlock | ImageBlock | VideoBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    OneOf("content blocks are of type 'text', 'image', 'video', 'tool_use', 'tool_result', 'thinking' or 'redacted_thinking'"),
]
OF_ROLES = {
    "system": (TextBlock,),
    "user": (TextBlock, ImageBlock, VideoBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock),
}


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Annotated[list[Block], FIRST] | str, OneOf("must be a string or a list of blocks")]


class ClientTool(Strict):
    """One of the client's own; those that Anthropic runs are of other types, and dropped."""

    type: Literal["custom", None] = None
    name: Name
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    """The budget is not held: `max_tokens` is."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: TokenCount | None = None


class OutputFormat(Strict):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Strict):
    format: OutputFormat | None = None
    effort: Effort | None = None


class CountRequest(Open):
    """The body of `POST /v1/messages/count_tokens`."""

    model: str | None = None
    messages: Annotated[list[Turn], MessageList]
    system: Annotated[Annotated[list[TextBlock], FIRST] | str | None, OneOf()] = None
    tools: Annotated[list[Annotated[ClientTool | HostedTool, OneOf()]], ToolList] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: TokenCount
    stop_sequences: Annotated[list[NotEmpty], Field(max_length=MAX_STOPS)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class MessageUsage(BaseModel):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessageUsage
    warnings: list[str] | None = None
    timings: dict[str, float] | None = None


class MessageProblem(BaseModel):
    type: str
    message: str


class MessageError(BaseModel):
    type: Literal["error"]
    error: MessageProblem


class MessageEvent(BaseModel):
    """One event's data; its `type` says which members there are."""

    type: str
    message: MessageAnswer | None = None
    index: int | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: MessageUsage | None = None
    error: MessageProblem | None = None


class TokensCounted(BaseModel):
    input_tokens: int
