"""`POST /v1/responses`, OpenAI's newer dialect: a request is translated into a chat completion, whose other fields it may have too.

Answers are not stored, so a request brings the whole conversation.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from starlette.responses import JSONResponse, Response

from engine.wire.messages import Event
from server.dialects.responses import schema
from server.dialects.responses.format import ResponseFormat
from server.dialects.responses.schema import (
    AnyTool,
    CallItem,
    ChosenTool,
    CustomCallItem,
    InputImage,
    InputVideo,
    MessageItem,
    ResponsesRequest,
    ResultItem,
    TextFormat,
    ThoughtItem,
    joined,
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

# Fields of the dialect that are not implemented, and those of chat completions that it has other names for, or no place.
LIMITED = limits_of(
    ((), "background_options conversation image max_completion_tokens max_tokens messages moderation"),
    ((), "previous_response_id prompt prompt_logprobs response_format"),
    ((False,), "background continue_final_message logprobs return_token_ids return_tokens_as_token_ids"),
    ((True,), "add_generation_prompt"),
    ((0,), "top_logprobs"),
    ((1,), "n"),
    (("disabled",), "truncation"),
)
# What a vendor does around its models: an answer without it says so.
DROPPED = ("context_management",)
# Fields without effect: they are for tools that are not here, or the same for every answer (which is never stored).
HARMLESS = ("access_programs", "max_tool_calls", "store", "stream_options")


class ResponsesEndpoint(ChatEndpoint):
    """An answer to items of OpenAI's newer dialect."""

    takes, gives, streams = ResponsesRequest, schema.ResponseAnswer, schema.ResponseEvent
    last_data = ""
    format = ResponseFormat
    prompt_field = "input"

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = check(ResponsesRequest, value)
        job = self.job(self.check(ChatRequest, chat_body(request, body.scanner)), body)
        job.warnings += self.note_dropped(value.keys() & DROPPED)
        params = job.submits[0].params
        job.echo = _echo(request) | {"temperature": params.temperature, "top_p": params.top_p}
        return job


class CountResponseTokens(GatheringEndpoint):
    """How long the prompt of a response would be, images included."""

    takes, gives = ResponsesRequest, schema.TokensCounted

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = check(ResponsesRequest, value)
        return counted_chat(self.check(ChatRequest, chat_body(request, body.scanner)), body)

    def answer(self, job: Job, events: list[Event]) -> Response:
        return JSONResponse({"object": "response.input_tokens", "input_tokens": len(events[0].prompt_ids)})


ROUTES: dict[str, type[Endpoint]] = {"/v1/responses": ResponsesEndpoint, "/v1/responses/input_tokens": CountResponseTokens}


def _echo(request: ResponsesRequest) -> dict[str, object]:
    """What an answer repeats of its request."""
    shape = request.text.format if request.text else None
    said = request.model_dump(include={"instructions", "max_output_tokens", "metadata", "tool_choice", "reasoning"})
    return said | {
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": shape.model_dump(by_alias=True, exclude_none=True) if shape else {"type": "text"}},
        "tool_choice": said["tool_choice"] or "auto",
        "tools": [tool.model_dump() for tool in request.tools or () if not isinstance(tool, HostedTool)],
    }


def chat_body(request: ResponsesRequest, scanner: Scanner) -> dict[str, Any]:
    """As chat completions have it. RequestError 400."""
    chat = rest_of(request.model_extra, LIMITED, (*HARMLESS, *DROPPED))
    chat |= request.model_dump(include={"model", "temperature", "top_p", "stream", "parallel_tool_calls"})
    chat["max_tokens"] = request.max_output_tokens
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    said = [{"role": "user", "content": request.input}] if isinstance(request.input, str) else _messages(request.input, scanner)
    chat["messages"] = [*system, *said]
    if request.tools:
        chat["tools"] = [chat_tool for tool in request.tools for chat_tool in _chat_tools(tool)]
    choice = request.tool_choice
    chat["tool_choice"] = {"type": choice.type, choice.type: {"name": choice.name}} if isinstance(choice, ChosenTool) else choice
    if request.text and request.text.format:
        chat["response_format"] = _response_format(request.text.format)
    if request.reasoning and request.reasoning.effort:
        chat["reasoning_effort"] = request.reasoning.effort
    return chat


def _chat_tools(tool: AnyTool) -> list[dict[str, Any]]:
    return [{"type": tool.type}] if isinstance(tool, HostedTool) else tool.functions()


def _response_format(shape: TextFormat) -> dict[str, Any]:
    if shape.type != "json_schema":
        return {"type": shape.type}
    if shape.json_schema is None:
        raise bad_value("text.format.schema", "is missing")
    return {"type": "json_schema", "json_schema": {"schema": shape.json_schema}}


def _messages(items: Iterable[Any], scanner: Scanner) -> Iterator[dict[str, Any]]:
    """Thoughts, the text after them and the calls after that are one message of the assistant."""
    turn: dict[str, Any] = {}
    for i, item in enumerate(items):
        is_new = isinstance(item, MessageItem | ThoughtItem) and (turn.get("content") or turn.get("tool_calls"))
        is_said = isinstance(item, MessageItem) and item.role == "assistant"
        is_assistants = is_said or isinstance(item, CallItem | CustomCallItem | ThoughtItem)
        if turn and (is_new or not is_assistants):
            yield _joined(turn)
            turn = {}
        if is_assistants:
            turn = turn or {"role": "assistant", "content": ""}
            _extend(turn, item, f"input.{i}")
        elif isinstance(item, ResultItem):
            content = _content(item.output, f"input.{i}.output", scanner)
            yield {"role": "tool", "tool_call_id": item.call_id, "content": content}
        else:
            yield {"role": item.role, "content": _content(item.content, f"input.{i}.content", scanner)}
    if turn:
        yield _joined(turn)


def _joined(turn: dict[str, Any]) -> dict[str, Any]:
    """A message whose thoughts came in pieces."""
    return turn | {"reasoning": "".join(turn["reasoning"])} if "reasoning" in turn else turn


def _extend(turn: dict[str, Any], item: MessageItem | CallItem | CustomCallItem | ThoughtItem, name: str) -> None:
    if isinstance(item, CallItem):
        function = {"name": joined(item.namespace, item.name), "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
    elif isinstance(item, CustomCallItem):
        custom = {"name": item.name, "input": item.input}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "custom", "custom": custom})
    elif isinstance(item, ThoughtItem):
        turn.setdefault("reasoning", []).extend(part.text for part in item.content or ())
    elif isinstance(item.content, str):
        turn["content"] = item.content
    else:
        if any(isinstance(part, InputImage | InputVideo) for part in item.content):
            raise bad_value(f"{name}.content", "a message of role 'assistant' has no images")
        turn["content"] = "".join(part.text for part in item.content if not isinstance(part, InputImage | InputVideo))


def _content(content: str | list[Any], name: str, scanner: Scanner) -> str | list[dict[str, Any]]:
    return content if isinstance(content, str) else [_part(part, f"{name}.{j}", scanner) for j, part in enumerate(content)]


def _part(part: Any, name: str, scanner: Scanner) -> dict[str, Any]:
    if isinstance(part, InputVideo):
        check_url(part.video_url, scanner, f"{name}.video_url")
        return part.model_dump(exclude_none=True)
    if not isinstance(part, InputImage):
        return {"type": "text", "text": part.text}
    url = part.image_url
    check_url(url, scanner, f"{name}.image_url")
    detail = "high" if part.detail == "original" else part.detail
    return {"type": "image_url", "image_url": {"url": url, "detail": detail} | part.model_dump(include={"min_pixels", "max_pixels"})}
