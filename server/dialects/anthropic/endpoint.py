"""`POST /v1/messages`, Anthropic's dialect: a request is translated into one of chat completions, whose other fields it may have too."""

from collections.abc import Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

from engine.wire.messages import Event
from server.dialects.anthropic import schema
from server.dialects.anthropic.format import MESSAGES_PATH, MessageFormat
from server.dialects.anthropic.schema import (
    Base64Source,
    ClientTool,
    CountRequest,
    ImageBlock,
    MessagesRequest,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    VideoBlock,
)
from server.http.body import Body
from server.http.scan import Scanner
from server.http.validate import bad_value, check
from server.openai.chat import ChatEndpoint, counted_chat
from server.openai.conversation import check_url
from server.openai.endpoint import Endpoint, GatheringEndpoint, Job
from server.openai.fields import limits_of, rest_of
from server.openai.schema import ChatRequest
from server.openai.tools import HostedTool

# Fields of the dialect that are not implemented, and those of chat completions that its answers have no place for.
LIMITED = limits_of(
    ((), "container enable_thinking max_completion_tokens output_format parallel_tool_calls response_format stop"),
    ((), "stream_options top_logprobs"),
    ((), "prompt_logprobs"),
    ((False,), "logprobs return_token_ids return_tokens_as_token_ids"),
    ((1,), "n"),
)
# What a vendor does around its models: an answer without it says so.
DROPPED = ("context_management", "mcp_servers")
HARMLESS = ("cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id")


class MessagesEndpoint(ChatEndpoint):
    """An answer to messages in Anthropic's dialect."""

    takes, gives, streams, fails = MessagesRequest, schema.MessageAnswer, schema.MessageEvent, schema.MessageError
    last_data = ""
    format = MessageFormat

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = check(MessagesRequest, value)
        job = self.job(self.check(ChatRequest, chat_body(request, body.scanner)), body)
        job.warnings += self.note_dropped(value.keys() & DROPPED)
        return job


class CountMessageTokens(GatheringEndpoint):
    """How long a prompt in Anthropic's dialect is, images included."""

    takes, gives, fails = CountRequest, schema.TokensCounted, schema.MessageError

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = check(CountRequest, value)
        return counted_chat(self.check(ChatRequest, chat_body(request, body.scanner)), body)

    def answer(self, job: Job, events: list[Event]) -> Response:
        return JSONResponse({"input_tokens": len(events[0].prompt_ids)})


ROUTES: dict[str, type[Endpoint]] = {MESSAGES_PATH: MessagesEndpoint, f"{MESSAGES_PATH}/count_tokens": CountMessageTokens}


def chat_body(request: CountRequest, scanner: Scanner) -> dict[str, Any]:
    """As chat completions have it. RequestError 400."""
    rest = rest_of(request.model_extra, LIMITED, (*HARMLESS, *DROPPED))
    chat = {**rest, "model": request.model, "messages": list(_messages(request, scanner))}
    last = chat["messages"][-1]
    if last["role"] == "assistant" and last["content"] and not last.get("tool_calls"):
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if request.tools:
        chat["tools"] = [_tool(tool) for tool in request.tools]
    if request.tool_choice:
        chat |= _tool_choice(request.tool_choice)
    if request.thinking and request.thinking.type != "adaptive":
        chat["enable_thinking"] = request.thinking.type == "enabled"
    if request.output_config and request.output_config.effort:
        chat["reasoning_effort"] = request.output_config.effort
    if request.output_config and request.output_config.format:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": request.output_config.format.json_schema}}
    if isinstance(request, MessagesRequest):
        same = {"max_tokens", "temperature", "top_p", "top_k", "stream"}
        chat |= request.model_dump(include=same) | {"stop": request.stop_sequences}
    return chat


def _tool(tool: ClientTool | HostedTool) -> dict[str, Any]:
    if isinstance(tool, HostedTool):
        return {"type": tool.type}
    return {"type": "function", "function": tool.model_dump(exclude={"type", "input_schema"}) | {"parameters": tool.input_schema}}


def _tool_choice(choice: schema.ToolChoice) -> dict[str, Any]:
    if choice.type == "tool" and choice.name is None:
        raise bad_value("tool_choice.name", "is missing")
    named = {"type": "function", "function": {"name": choice.name}}
    kinds: dict[str, Any] = {"auto": "auto", "any": "required", "tool": named, "none": "none"}
    return {"tool_choice": kinds[choice.type], "parallel_tool_calls": not choice.disable_parallel_tool_use}


def _messages(request: CountRequest, scanner: Scanner) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": _content(request.system, "system", scanner)}
    for i, message in enumerate(request.messages):
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
            continue
        name = f"messages.{i}.content"
        for j, block in enumerate(message.content):
            if not isinstance(block, schema.OF_ROLES[message.role]):
                raise bad_value(f"{name}.{j}", f"a message of role '{message.role}' has no blocks of type '{block.type}'")
        if message.role == "assistant":
            yield _assistant(message.content)
        else:
            yield from _user(message.role, message.content, name, scanner)


def _assistant(blocks: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(block.text for block in blocks if isinstance(block, TextBlock))}
    thoughts = "".join(block.thinking for block in blocks if isinstance(block, schema.ThinkingBlock))
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
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content, f"{name}.{j}.content", scanner)}
    if parts or not blocks:
        yield {"role": role, "content": parts or ""}


def _content(content: Any, name: str, scanner: Scanner) -> Any:
    return [_part(block, f"{name}.{k}", scanner) for k, block in enumerate(content)] if isinstance(content, list) else content


def _part(block: TextBlock | ImageBlock | VideoBlock, name: str, scanner: Scanner) -> dict[str, Any]:
    if isinstance(block, TextBlock):
        return {"type": "text", "text": block.text}
    source = block.source
    if isinstance(source, Base64Source):
        is_whole = scanner.index_of(source.data) is not None
        url = source.data if is_whole else f"data:{source.media_type};base64,{source.data}"
    else:
        url = source.url
        check_url(url, scanner, f"{name}.source.url")
    return {"type": f"{block.type}_url", f"{block.type}_url": {"url": url}}
