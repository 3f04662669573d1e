"""`POST /v1/messages`, Anthropic's dialect: a request is translated into one of chat completions. Routed to by `server/http/app.py`.

What the dialect lacks and chat completions have, such as `seed` or a grammar, may stand in a request too and means the same.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag
from starlette.responses import JSONResponse, Response

from engine.messages import Event
from server.api.chat import ChatEndpoint
from server.api.conversation import URL_SCHEMES
from server.api.fields import check_limited
from server.api.generation import GatheringEndpoint, Job
from server.api.schema import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, ChatRequest, TokenCount
from server.api.tokens import counted_chat
from server.http.body import Body
from server.http.message_events import MessageFormat
from server.http.scan import Scanner
from server.http.validate import Strict, bad_value, check

# Fields of the dialect that are not implemented, and those of chat completions that its answers have no place for.
LIMITED: dict[str, tuple[object, ...]] = {
    "container": (),
    "output_format": (),  # `output_config.format` is read
    "context_management": (),
    "mcp_servers": ([],),
    "stop": (),
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "stream_options": (),
    "max_completion_tokens": (),
    "parallel_tool_calls": (),
    "enable_thinking": (),
    "response_format": (),
}
HARMLESS = ("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")


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


def _tag(value: object) -> str:
    return f"<{value.get('type') if isinstance(value, dict) else None}>"


Source = Annotated[
    Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
    Discriminator(_tag, custom_error_type="source_type", custom_error_message="must be of type 'base64' or 'url'"),
]


class ImageBlock(Strict):
    type: Literal["image"]
    source: Source


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


ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
    Discriminator(_tag, custom_error_type="block_type", custom_error_message="blocks of a result are of type 'text' or 'image'"),
]


def _content_tag(value: object) -> str:
    return "<blocks>" if isinstance(value, list) else "<text>"


ResultBlocks = Annotated[list[ResultBlock], Field(fail_fast=True), Tag("<blocks>")]


class ToolResultBlock(Strict):
    """What a tool said. `is_error` adds nothing that templates could show: the content says it."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: Annotated[ResultBlocks | Annotated[str | None, Tag("<text>")], Discriminator(_content_tag)] = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedBlock, Tag("<redacted_thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        _tag,
        custom_error_type="block_type",
        custom_error_message="content blocks are of type 'text', 'image', 'tool_use', 'tool_result', 'thinking' or 'redacted_thinking'",
    ),
]
Blocks = Annotated[list[Block], Field(fail_fast=True), Tag("<blocks>")]
OF_ROLES = {
    "system": (TextBlock,),
    "user": (TextBlock, ImageBlock, ToolResultBlock),
    "assistant": (TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock),
}


class Message(Strict):
    role: Literal["user", "assistant", "system"]
    content: Annotated[Blocks | Annotated[str, Tag("<text>")], Discriminator(_content_tag)]


class Tool(Strict):
    """One of the client's own; those that Anthropic runs are of other types."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
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
    effort: Literal["high"] | None = None  # the default


SystemBlocks = Annotated[list[TextBlock], Field(fail_fast=True), Tag("<blocks>")]


class CountRequest(Strict):
    """The body of `POST /v1/messages/count_tokens`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Annotated[SystemBlocks | Annotated[str | None, Tag("<text>")], Discriminator(_content_tag)] = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: TokenCount
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


class MessagesEndpoint(ChatEndpoint):
    """Messages in Anthropic's dialect, answered in it."""

    format = MessageFormat

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = check(MessagesRequest, value)
        return self.job(self.check(ChatRequest, chat_body(request, body.scanner)), body)


class CountMessageTokens(GatheringEndpoint):
    """How long a prompt would be, images included."""

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = check(CountRequest, value)
        return counted_chat(self.check(ChatRequest, chat_body(request, body.scanner)), body)

    def answer(self, job: Job, events: list[Event]) -> Response:
        return JSONResponse({"input_tokens": len(events[0].prompt_ids)})


def chat_body(request: CountRequest, scanner: Scanner) -> dict[str, Any]:
    """The same request as chat completions have it. RequestError 400."""
    extra = {name: value for name, value in (request.model_extra or {}).items() if name not in HARMLESS}
    for name in LIMITED.keys() & extra.keys():
        check_limited(name, extra.pop(name), LIMITED[name], name)
    chat = {**extra, "model": request.model, "messages": list(_messages(request, scanner))}
    last = chat["messages"][-1]
    if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        chat["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice:
        chat |= _tool_choice(request.tool_choice)
    if request.thinking and request.thinking.type != "adaptive":
        chat["enable_thinking"] = request.thinking.type == "enabled"
    if request.output_config and request.output_config.format:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": request.output_config.format.json_schema}}
    if isinstance(request, MessagesRequest):
        same = ("max_tokens", "temperature", "top_p", "top_k", "stream")
        chat |= {name: getattr(request, name) for name in same} | {"stop": request.stop_sequences}
    return chat


def _tool(tool: Tool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema, "strict": tool.strict}
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise bad_value("tool_choice.name", "is missing")
    named = {"type": "function", "function": {"name": choice.name}}
    kinds: dict[str, Any] = {"auto": "auto", "any": "required", "tool": named, "none": "none"}
    return {"tool_choice": kinds[choice.type], "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _messages(request: CountRequest, scanner: Scanner) -> Iterator[dict[str, Any]]:
    if request.system:
        system = request.system
        yield {"role": "system", "content": system if isinstance(system, str) else [_text(block) for block in system]}
    for i, message in enumerate(request.messages):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            continue
        for j, block in enumerate(message.content):
            if not isinstance(block, OF_ROLES[message.role]):
                raise bad_value(f"messages.{i}.content.{j}", f"a message of role '{message.role}' has no blocks of type '{block.type}'")
        if message.role == "assistant":
            yield _assistant(message.content)
        else:
            yield from _user(message.role, message.content, f"messages.{i}.content", scanner)


def _assistant(blocks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(block.text for block in blocks if isinstance(block, TextBlock))}
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    uses = [block for block in blocks if isinstance(block, ToolUseBlock)]
    calls = [{"id": use.id, "type": "function", "function": {"name": use.name, "arguments": use.input}} for use in uses]
    return message | ({"reasoning": thoughts} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def _user(role: str, blocks: list[Any], name: str, scanner: Scanner) -> Iterator[dict[str, Any]]:
    """Every result of a tool is a message of its own, and so is what stands between them."""
    parts: list[dict[str, Any]] = []
    for j, block in enumerate(blocks):
        if not isinstance(block, ToolResultBlock):
            parts.append(_part(block, f"{name}.{j}", scanner))
            continue
        if parts:
            yield {"role": role, "content": parts}
            parts = []
        content: Any = block.content
        if isinstance(content, list):
            content = [_part(inner, f"{name}.{j}.content.{k}", scanner) for k, inner in enumerate(content)]
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if parts or not blocks:
        yield {"role": role, "content": parts or ""}


def _part(block: TextBlock | ImageBlock, name: str, scanner: Scanner) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return _text(block)
    source = block.source
    if isinstance(source, Base64Source):
        is_whole = scanner.index_of(source.data) is not None
        url = source.data if is_whole else f"data:{source.media_type};base64,{source.data}"
    else:
        url = source.url
        if scanner.index_of(url) is None and not url.lower().startswith(URL_SCHEMES):
            raise bad_value(f"{name}.source.url", "expected a data:, http://, https:// or file:// URL")
    return {"type": "image_url", "image_url": {"url": url}}


def _text(block: TextBlock) -> dict[str, Any]:
    return {"type": "text", "text": block.text}
