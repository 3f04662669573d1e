"""`POST /v1/messages`, Anthropic's dialect: a request is translated to a chat completion, whose other fields are accepted, too."""

import secrets
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic_core import from_json
from starlette.responses import JSONResponse

from engine.wire.messages import ErrorInfo
from engine.wire.params import NotEmpty, TokenCount, TopK
from models.config.types import MEDIA_KINDS, MediaKind
from server.api.chat.completions import DialectRequest, TranslatedChat, assistant_message
from server.api.chat.endpoint import Endpoint, MakeFormat
from server.api.dialects.blocks import BlockFormat, named_event
from server.api.dialects.tokens import counted_chat
from server.api.http.body import Body
from server.api.http.reply import Reply
from server.api.http.scan import Scanner
from server.api.http.streaming import Call, Choice, ReplyOptions, Usage, encode
from server.api.schema.formats import SchemaFormat
from server.api.schema.parts import FIRST, FunctionDefinition, Parameters, ToolList, client_tools
from server.api.schema.requests import MAX_STOPS, ChatRequest, Effort, MessageList
from server.api.schema.validate import BY_TYPE, Strict, bad_value, check

MESSAGES_PATH = "/v1/messages"
ERROR_TYPES = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 503: "overloaded_error"}
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


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


class MediaBlock(Strict):
    type: MediaKind
    source: Annotated[Base64Source | UrlSource, BY_TYPE]


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer. Signatures and redacted text are ignored."""

    type: Literal["thinking", "redacted_thinking"]
    thinking: str = ""


class ToolUseBlock(Strict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


ResultBlock = Annotated[TextBlock | MediaBlock, BY_TYPE]


class ToolResultBlock(Strict):
    """Result of a tool. `is_error` has no effect: the model sees the content."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[list[ResultBlock], FIRST] | str | None = None


Block = Annotated[TextBlock | MediaBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, BY_TYPE]
OF_ROLES = {
    "system": ("text",),
    "user": ("text", *MEDIA_KINDS, "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
}


class Turn(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], FIRST] | str


class ClientTool(FunctionDefinition):
    type: Literal["custom", None] = None
    parameters: Parameters = Field(alias="input_schema")

    def as_chat(self) -> dict[str, Any]:
        return {"type": "function", "function": self.model_dump(exclude={"type"})}


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(Strict):
    format: SchemaFormat | None = None
    effort: Effort | None = None


class CountRequest(DialectRequest):
    messages: Annotated[list[Turn], MessageList]
    system: Annotated[list[TextBlock], FIRST] | str | None = None
    tools: Annotated[list[ClientTool], ToolList, client_tools(ClientTool, "custom", None)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: SchemaFormat | None = None  # an older name of `output_config.format`

    def chat_body(self, scanner: Scanner) -> dict[str, Any]:
        chat = self.as_chat({"max_tokens", "top_k", "stop"})
        chat["messages"] = list(_messages(self, scanner))
        last = chat["messages"][-1]
        if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
            chat |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            chat["tools"] = [tool.as_chat() for tool in self.tools]
        if self.tool_choice:
            chat |= _tool_choice(self.tool_choice)
        if self.thinking and self.thinking.type != "adaptive":
            chat["enable_thinking"] = self.thinking.type == "enabled"
        if self.output_config:
            chat |= {"reasoning_effort": self.output_config.effort, "response_format": self.output_config.format}
        if self.output_format:
            chat["response_format"] = self.output_format
        return chat


class MessagesRequest(CountRequest):
    max_tokens: TokenCount
    stop: Annotated[list[NotEmpty], Field(max_length=MAX_STOPS)] | None = Field(alias="stop_sequences", default=None)
    top_k: TopK | None = None


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    kinds = {"any": "required", "tool": {"type": "function", "function": {"name": choice.name}}}
    return {"tool_choice": kinds.get(choice.type, choice.type), "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _messages(request: CountRequest, scanner: Scanner) -> Iterator[dict[str, Any]]:
    """Yield a message per turn, one per result of a tool in it, and one per run of blocks between these."""
    if request.system:
        yield {"role": "system", "content": _content(request.system, scanner)}
    for i, turn in enumerate(request.messages):
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
            continue
        parts, thoughts, calls = list[dict[str, Any]](), list[str](), list[dict[str, Any]]()
        for j, block in enumerate(turn.content):
            if block.type not in OF_ROLES[turn.role]:
                raise bad_value(f"messages.{i}.content.{j}", f"a message of role '{turn.role}' has no blocks of type '{block.type}'")
            if block.type == "tool_result":
                if parts:
                    yield {"role": turn.role, "content": parts}
                    parts = []
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content, scanner)}
            elif block.type == "tool_use":
                calls.append({"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}})
            elif isinstance(block, ThinkingBlock):
                thoughts.append(block.thinking)
            else:
                parts.append(_part(block, scanner))
        if turn.role == "assistant":
            yield assistant_message([part["text"] for part in parts], thoughts, calls)
        elif parts or not turn.content:
            yield {"role": turn.role, "content": parts or ""}


def _content(content: Any, scanner: Scanner) -> Any:
    return [_part(block, scanner) for block in content] if isinstance(content, list) else content


def _part(block: Any, scanner: Scanner) -> dict[str, Any]:
    if block.type == "text":
        return {"type": "text", "text": block.text}
    source = block.source
    if source.type == "url":
        url = source.url
    else:
        url = source.data if scanner.index_of(source.data) is not None else f"data:{source.media_type};base64,{source.data}"
    return {"type": f"{block.type}_url", f"{block.type}_url": {"url": url}}


class MessageFormat(BlockFormat):
    ping = named_event("ping")

    def __init__(self, options: ReplyOptions):
        self._head = {"id": f"msg_{secrets.token_hex(16)}", "type": "message", "role": "assistant", "model": options.model}
        self._index = -1  # index of the last block

    def first_chunk(self, choice: Choice) -> bytes:
        ending = {"stop_reason": None, "stop_sequence": None, "usage": usage_json(choice.usage)}
        return named_event("message_start", message={**self._head, "content": [], **ending})

    def begin(self, call: Call | None) -> bytes:
        self._index += 1
        return named_event("content_block_start", index=self._index, content_block=_block(self._open, "", call))

    def stop(self, status: str) -> bytes:
        return named_event("content_block_stop", index=self._index)

    def delta(self, piece: str) -> bytes:
        kind, name = ("input_json", "partial_json") if self._open == "call" else (self._open, self._open)
        return named_event("content_block_delta", index=self._index, delta={"type": f"{kind}_delta", name: piece})

    def finish_chunk(self, choice: Choice, timings: dict[str, object]) -> bytes:
        return self._stop() + named_event("message_delta", delta=_ending(choice), usage=usage_json(choice.usage), **timings)

    def end(self, usage: Usage, timings: dict[str, object]) -> bytes:
        return named_event("message_stop")

    def document(self, choices: list[Choice], usage: Usage, timings: dict[str, object]) -> bytes:
        content = {"content": [_block(*block) for block in choices[0].blocks()], **_ending(choices[0])}
        return encode({**self._head, **content, "usage": usage_json(usage), **timings})

    def error_chunk(self, info: ErrorInfo) -> bytes:
        return b"event: error\ndata: " + message_error_body(info) + b"\n\n"


def message_error_body(info: ErrorInfo) -> bytes:
    kind = ERROR_TYPES.get(info.status, "invalid_request_error" if info.status < 500 else "api_error")
    return encode({"type": "error", "error": {"type": kind, "message": info.message}})


def usage_json(usage: Usage) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": usage.num_cached}
    return {"input_tokens": usage.num_prompt - usage.num_cached, **cached, "output_tokens": usage.num_generated}


def _ending(choice: Choice) -> dict[str, Any]:
    is_string = choice.finish_reason == "stop" and isinstance(choice.stop_reason, str)
    reason = "stop_sequence" if is_string else STOP_REASONS.get(choice.finish_reason or "", "end_turn")
    return {"stop_reason": reason, "stop_sequence": choice.stop_reason if is_string else None}


def _block(kind: str, text: str, call: Call | None) -> dict[str, Any]:
    if call is None:
        return {"type": kind, kind: text, **({"signature": ""} if kind == "thinking" else {})}
    try:
        arguments = from_json(text, allow_partial=True, cache_strings="keys")  # truncated ones as far as possible, like the SDK
    except ValueError:
        arguments = None
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments if isinstance(arguments, dict) else {}}


class MessagesEndpoint(TranslatedChat):
    """An answer to messages in Anthropic's dialect."""

    takes = MessagesRequest

    def format_of(self, request: MessagesRequest) -> MakeFormat:
        return MessageFormat


class CountMessageTokens(Endpoint):
    """The number of tokens of such a prompt, images included."""

    takes = CountRequest

    def read(self, value: dict[str, Any], body: Body) -> Reply:
        request = self.check(ChatRequest, check(CountRequest, value).chat_body(body.scanner))
        return counted_chat(request, body, lambda events: JSONResponse({"input_tokens": len(events[0].prompt_ids)}))


ROUTES: dict[str, type[Endpoint]] = {MESSAGES_PATH: MessagesEndpoint, f"{MESSAGES_PATH}/count_tokens": CountMessageTokens}
