"""`POST /v1/responses`, OpenAI's newer dialect: a request is translated to a chat completion, whose other fields are accepted, too.

Answers are not stored, so a request contains the whole conversation. A stream consists of numbered events."""

import functools
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from engine.wire.messages import ErrorInfo
from engine.wire.params import TokenCount
from server.api.chat.completions import DialectRequest, TranslatedChat, assistant_message
from server.api.chat.endpoint import Endpoint, MakeFormat
from server.api.dialects.blocks import BlockFormat, named_event
from server.api.http.scan import Scanner
from server.api.http.streaming import Call, Choice, ReplyOptions, Usage, encode
from server.api.schema.formats import AnswerFormat
from server.api.schema.parts import (
    FIRST,
    Content,
    FunctionDefinition,
    FunctionName,
    Name,
    RefusalPart,
    TextPart,
    ToolList,
    client_tools,
)
from server.api.schema.requests import MessageList, Reasoning
from server.api.schema.validate import BY_TYPE, Strict, bad_value

REPEATED = {"instructions", "max_tokens", "metadata", "reasoning", "text", "tool_choice"}  # fields that answers repeat
Json = dict[str, Any]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class CallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = ""


class ResultItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningItem(Strict):
    """Reasoning of an earlier answer. Encrypted content is ignored."""

    type: Literal["reasoning"]
    content: Annotated[list[TextPart], FIRST] | None = None


def _typed(item: object) -> object:
    return {**item, "type": item.get("type") or "message"} if isinstance(item, dict) else item


Item = Annotated[MessageItem | CallItem | ResultItem | ReasoningItem, BY_TYPE, BeforeValidator(_typed)]


class FlatTool(FunctionDefinition):
    type: Literal["function"]

    def as_function(self, namespace: str | None) -> Json:
        function = self.model_dump(exclude={"type"}, exclude_unset=True) | {"name": joined(namespace, self.name)}
        return {"type": "function", "function": function}


class Namespace(Strict):
    """Functions of an MCP server that the client connects to."""

    type: Literal["namespace"]
    name: Name
    tools: Annotated[list[FlatTool], ToolList, client_tools(FlatTool, "function", None)]


AnyTool = Annotated[FlatTool | Namespace, BY_TYPE]


class ChosenTool(FunctionName):
    type: Literal["function"]


class TextOptions(Strict):
    format: AnswerFormat = None


class ResponsesRequest(DialectRequest):
    input: Annotated[list[Item], MessageList] | str
    instructions: str | None = None
    max_tokens: TokenCount | None = Field(alias="max_output_tokens", default=None)
    tools: Annotated[list[AnyTool], ToolList, client_tools(AnyTool, "function", "namespace", None)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Json | None = None

    def chat_body(self, scanner: Scanner) -> Json:
        chat = self.as_chat({"max_tokens", "parallel_tool_calls"})
        messages = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else _messages(self.input)
        chat["messages"] = [*([{"role": "system", "content": self.instructions}] if self.instructions else ()), *messages]
        chat["tools"] = [tool.as_function(namespace) for namespace, tool in self.flat_tools()] or None
        chat["tool_choice"] = _choice(self.tool_choice)
        chat["response_format"] = self.text and self.text.format
        chat["reasoning"] = self.reasoning
        return chat

    def flat_tools(self) -> Iterator[tuple[str | None, FlatTool]]:
        """Yield the client's tools with their namespaces."""
        for tool in self.tools or ():
            namespace, tools = (tool.name, tool.tools) if isinstance(tool, Namespace) else (None, [tool])
            yield from ((namespace, one) for one in tools)


def joined(namespace: str | None, name: str) -> str:
    """Return the function's name as the model sees it."""
    return name if namespace is None else f"{namespace}__{name}"


def _choice(choice: Any) -> Any:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ChosenTool) else choice


def _messages(items: list[Any]) -> Iterator[Json]:
    """Yield messages. Reasoning, the text after it and the calls after that form one message of the assistant."""
    texts, thoughts, calls = list[str](), list[str](), list[Json]()
    for i, item in enumerate([*items, None]):
        is_assistant = isinstance(item, MessageItem) and item.role == "assistant"
        is_next = isinstance(item, MessageItem | ReasoningItem) and (texts or calls)
        if (texts or thoughts or calls) and (is_next or not (is_assistant or isinstance(item, CallItem | ReasoningItem))):
            yield assistant_message(texts, thoughts, calls)
            texts, thoughts, calls = [], [], []
        if isinstance(item, CallItem):
            function = {"name": joined(item.namespace, item.name), "arguments": item.arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif isinstance(item, ReasoningItem):
            thoughts += [part.text for part in item.content or ()]
        elif isinstance(item, ResultItem):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
        elif is_assistant:
            parts = [item.content] if isinstance(item.content, str) else item.content
            if not all(isinstance(part, str | TextPart | RefusalPart) for part in parts):
                raise bad_value(f"input.{i}.content", "a message of role 'assistant' has no images")
            texts += [part if isinstance(part, str) else part.text for part in parts]
        elif item is not None:
            yield {"role": item.role, "content": item.content}


class Kind(NamedTuple):
    prefix: str  # of its ids
    delta: str  # name of its events
    start: Json  # its first members
    field: str = ""  # member with its text, if not `content`


KINDS = {
    "thinking": Kind("rs", "reasoning_text", {"type": "reasoning", "summary": [], "content": []}),
    "text": Kind("msg", "output_text", {"type": "message", "role": "assistant", "content": []}),
    "call": Kind("fc", "function_call_arguments", {"type": "function_call"}, "arguments"),
}


class ResponseFormat(BlockFormat):
    """Format of responses. `repeated`: members that the answer repeats from its request; `tools`: the client's, with their namespaces."""

    def __init__(self, options: ReplyOptions, repeated: Json, tools: list[tuple[str | None, FlatTool]]):
        self._head = {
            "id": f"resp_{secrets.token_hex(16)}", "object": "response", "created_at": options.created, "model": options.model,
            "background": False, "truncation": "disabled", "store": False, "previous_response_id": None, "error": None,
            "completed_at": None, "incomplete_details": None, "usage": None, **repeated,
            "temperature": options.params.temperature, "top_p": options.params.top_p,
        }  # fmt: skip
        self._names = {joined(namespace, tool.name): {"namespace": namespace, "name": tool.name} for namespace, tool in tools if namespace}
        self._num_events = 0
        self._items: list[Json] = []  # started items; the last one may be open

    def first_chunk(self, choice: Choice) -> bytes:
        response = self._head | {"status": "in_progress", "output": []}
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def begin(self, call: Call | None) -> bytes:
        kind = KINDS[self._open]
        self._pieces = list[str]()
        item = {"id": f"{kind.prefix}_{secrets.token_hex(16)}", "status": "in_progress", **kind.start}
        if call is not None:
            item |= {"call_id": call.id, **self._names.get(call.name, {"name": call.name}), kind.field: ""}
        self._items.append(item)
        return self._item_event("added") + self._part_event("added", "")

    def stop(self, status: str) -> bytes:
        text, item, kind = "".join(self._pieces), self._items[-1], KINDS[self._open]
        named = {"name": item["name"]} if self._open == "call" else {}
        done = self._open_event(f"{kind.delta}.done", **named, **{kind.field or "text": text})
        done += self._part_event("done", text)
        item |= {"status": status, **({kind.field: text} if kind.field else {"content": [self._part(text)]})}
        return done + self._item_event("done")

    def delta(self, piece: str) -> bytes:
        self._pieces.append(piece)
        return self._open_event(f"{KINDS[self._open].delta}.delta", delta=piece)

    def finish_chunk(self, choice: Choice, timings: Json) -> bytes:
        last_item, response = self._finish(choice, choice.usage, timings)
        return last_item + self._event(response["status"], response=response)

    def end(self, usage: Usage, timings: Json) -> bytes:
        return b""

    def document(self, choices: list[Choice], usage: Usage, timings: Json) -> bytes:
        for kind, text, call in choices[0].blocks():
            self._begin(kind, call)
            self.delta(text)
        return encode(self._finish(choices[0], usage, timings)[1])

    def error_chunk(self, info: ErrorInfo) -> bytes:
        failure = {"status": "failed", "error": {"code": "server_error", "message": info.message}, "output": self._items}
        error = self._event("error", code=info.code or info.type, message=info.message, param=info.param)
        return error + self._event("failed", response=self._head | failure)

    def _finish(self, choice: Choice, usage: Usage, timings: Json) -> tuple[bytes, Json]:
        """Return the last item's events and the completed response. A call that was cut by a stop string is an incomplete item of it."""
        is_cut = choice.finish_reason in ("length", "abort")
        is_half = is_cut or (self._open == "call" and not choice.calls[-1].is_whole)
        events = self._stop("incomplete" if is_half else "completed")
        cut: Json = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        ending = cut if is_cut else {"status": "completed", "completed_at": int(time.time())}
        metadata = {**(self._head.get("metadata") or {}), **timings.get("metadata", {})}
        return events, self._head | ending | {"usage": usage_json(usage), "output": self._items, **timings, "metadata": metadata}

    def _item_event(self, step: str) -> bytes:
        return self._event(f"output_item.{step}", output_index=len(self._items) - 1, item=self._items[-1])

    def _part_event(self, step: str, text: str) -> bytes:
        return b"" if KINDS[self._open].field else self._open_event(f"content_part.{step}", part=self._part(text))

    def _part(self, text: str) -> Json:
        shared: Json = {"annotations": [], "logprobs": []} if self._open == "text" else {}
        return {"type": KINDS[self._open].delta, "text": text, **shared}

    def _open_event(self, name: str, /, **fields: object) -> bytes:
        fields |= {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        fields |= {} if KINDS[self._open].field else {"content_index": 0}
        return self._event(name, **fields, **({"logprobs": []} if self._open == "text" else {}))

    def _event(self, name: str, /, **fields: object) -> bytes:
        self._num_events += 1
        return named_event(name if name == "error" else f"response.{name}", sequence_number=self._num_events - 1, **fields)


def usage_json(usage: Usage) -> Json:
    return {
        "input_tokens": usage.num_prompt,
        "input_tokens_details": {"cached_tokens": usage.num_cached, "cache_write_tokens": 0},
        "output_tokens": usage.num_generated,
        "output_tokens_details": {"reasoning_tokens": usage.num_reasoning, **usage.details.as_json()},
        "total_tokens": usage.num_prompt + usage.num_generated,
    }


class ResponsesEndpoint(TranslatedChat):
    """An answer to items of OpenAI's newer dialect."""

    takes = ResponsesRequest
    prompt_field = "input"

    def format_of(self, request: ResponsesRequest) -> MakeFormat:
        repeated = request.model_dump(include=REPEATED, by_alias=True)
        repeated |= {"tool_choice": repeated["tool_choice"] or "auto", "parallel_tool_calls": request.parallel_tool_calls is not False}
        repeated["tools"] = [tool.model_dump() for tool in request.tools or ()]
        return functools.partial(ResponseFormat, repeated=repeated, tools=[*request.flat_tools()])


ROUTES: dict[str, type[Endpoint]] = {"/v1/responses": ResponsesEndpoint}
