"""`POST /v1/responses`, OpenAI's newer dialect: a request is translated into one of chat completions. Routed to by `server/http/app.py`.

Nothing is stored: a client sends the items of a conversation itself. What the dialect lacks and chat completions have, such as `seed` or
a grammar, may stand in a request too and means the same.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag

from server.api.chat import ChatEndpoint
from server.api.conversation import URL_SCHEMES
from server.api.fields import check_limited
from server.api.generation import Job
from server.api.schema import MAX_MESSAGES, MAX_TOOLS, ChatRequest, FunctionDefinition, PixelLimits, RefusalPart, TokenCount
from server.http.body import Body
from server.http.response_events import ResponseFormat
from server.http.scan import Scanner
from server.http.sse import Format
from server.http.validate import Strict, bad_value, check

# Fields of the dialect that are not implemented, and those of chat completions that it has other names for, or no place.
LIMITED: dict[str, tuple[object, ...]] = {
    "background": (False,),
    "background_options": (),
    "context_management": (),
    "conversation": (),
    "image": (),
    "moderation": (),
    "previous_response_id": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "messages": (),
    "max_tokens": (),
    "max_completion_tokens": (),
    "response_format": (),
    "n": (1,),
    "logprobs": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
}
# Of tools that are not here, of tokens that nobody reads, or the same for every answer.
HARMLESS = ("access_programs", "max_tool_calls", "stream_options")


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: str


class InputImage(PixelLimits):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: None = None


def _part_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<text>" if kind in ("input_text", "output_text", "text") else f"<{kind}>"


Part = Annotated[
    Annotated[InputText, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")] | Annotated[InputImage, Tag("<input_image>")],
    Discriminator(
        _part_tag, custom_error_type="part_type", custom_error_message="parts are of type 'input_text', 'input_image' or 'output_text'"
    ),
]


def _content_tag(value: object) -> str:
    return "<list>" if isinstance(value, list) else "<text>"


Parts = Annotated[list[Part], Field(fail_fast=True), Tag("<list>")]
Content = Annotated[Parts | Annotated[str, Tag("<text>")], Discriminator(_content_tag)]


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
    content: Annotated[list[ThoughtPart], Field(fail_fast=True)] | None = None


def _item_tag(value: object) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else None
    return f"<{kind}>"


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<function_call>")]
    | Annotated[ResultItem, Tag("<function_call_output>")]
    | Annotated[ThoughtItem, Tag("<reasoning>")],
    Discriminator(
        _item_tag,
        custom_error_type="item_type",
        custom_error_message="items are of type 'message', 'function_call', 'function_call_output' or 'reasoning'; nothing else is stored",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True), Tag("<list>")]


class Tool(FunctionDefinition):
    """One of the client's own; those that OpenAI runs are of other types."""

    type: Literal["function"]


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


class ResponsesRequest(Strict):
    """The body of `POST /v1/responses`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: Annotated[Items | Annotated[str, Tag("<text>")], Discriminator(_content_tag)]
    instructions: str | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    stream: bool | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # of which there is nothing
    metadata: dict[str, Any] | None = None


class ResponsesEndpoint(ChatEndpoint):
    """Items in OpenAI's newer dialect, answered in it."""

    prompt_field = "input"

    def read(self, value: dict[str, Any], body: Body) -> Job:
        request = check(ResponsesRequest, value)
        job = self.job(self.check(ChatRequest, chat_body(request, body.scanner)), body)
        params = job.submits[0].params
        job.echo = _echo(request) | {"temperature": params.temperature, "top_p": params.top_p}
        return job

    def format_of(self, job: Job) -> Callable[..., Format]:
        return functools.partial(ResponseFormat, echo=job.echo)


def _echo(request: ResponsesRequest) -> dict[str, object]:
    """What an answer repeats of its request, whose tools and formats the client's libraries read there."""
    shape = request.text.format if request.text else None
    said = request.model_dump(include={"instructions", "max_output_tokens", "metadata", "tool_choice", "reasoning"})
    return said | {
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "text": {"format": shape.model_dump(by_alias=True, exclude_none=True) if shape else {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in request.tools or ()],
    }


def chat_body(request: ResponsesRequest, scanner: Scanner) -> dict[str, Any]:
    """The same request as chat completions have it. RequestError 400."""
    extra = {name: value for name, value in (request.model_extra or {}).items() if name not in HARMLESS}
    for name in LIMITED.keys() & extra.keys():
        check_limited(name, extra.pop(name), LIMITED[name], name)
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")
    chat = {**extra, **{name: getattr(request, name) for name in same}, "max_tokens": request.max_output_tokens}
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    if isinstance(request.input, str):
        chat["messages"] = [*system, {"role": "user", "content": request.input}]
    else:
        chat["messages"] = [*system, *_messages(request.input, scanner)]
    if request.tools:
        chat["tools"] = [{"type": "function", "function": tool.model_dump(exclude={"type"})} for tool in request.tools]
    chat["tool_choice"] = _tool_choice(request.tool_choice)
    if request.text and request.text.format:
        chat["response_format"] = _response_format(request.text.format)
    if request.reasoning and request.reasoning.effort == "none":
        chat["enable_thinking"] = False
    return chat


def _tool_choice(choice: Any) -> Any:
    """A function stands there without an object around its name."""
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if not (choice is None or choice in ("none", "auto", "required")):
        raise bad_value("tool_choice", "must be 'none', 'auto', 'required' or {\"type\": \"function\", \"name\": ...}")
    return choice


def _response_format(shape: TextFormat) -> dict[str, Any]:
    if shape.type != "json_schema":
        return {"type": shape.type}
    if shape.json_schema is None:
        raise bad_value("text.format.schema", "is missing")
    return {"type": "json_schema", "json_schema": {"schema": shape.json_schema}}


def _messages(items: Iterable[Any], scanner: Scanner) -> Iterator[dict[str, Any]]:
    """Thoughts, what is said behind them and the calls behind that are one message of the assistant."""
    turn: dict[str, Any] = {}
    for i, item in enumerate(items):
        is_new = isinstance(item, MessageItem | ThoughtItem) and (turn.get("content") or turn.get("tool_calls"))
        is_assistants = isinstance(item, CallItem | ThoughtItem) or (isinstance(item, MessageItem) and item.role == "assistant")
        if turn and (is_new or not is_assistants):
            yield turn
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
        yield turn


def _extend(turn: dict[str, Any], item: MessageItem | CallItem | ThoughtItem, name: str) -> None:
    if isinstance(item, CallItem):
        call = {"id": item.call_id, "type": "function", "function": {"name": item.name, "arguments": item.arguments}}
        turn.setdefault("tool_calls", []).append(call)
    elif isinstance(item, ThoughtItem):
        turn["reasoning"] = turn.get("reasoning", "") + "".join(part.text for part in item.content or ())
    elif isinstance(item.content, str):
        turn["content"] = item.content
    else:
        if any(isinstance(part, InputImage) for part in item.content):
            raise bad_value(f"{name}.content", "a message of role 'assistant' has no images")
        turn["content"] = "".join(part.text for part in item.content if not isinstance(part, InputImage))


def _content(content: str | list[Any], name: str, scanner: Scanner) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    return [_part(part, f"{name}.{j}", scanner) for j, part in enumerate(content)]


def _part(part: InputText | RefusalPart | InputImage, name: str, scanner: Scanner) -> dict[str, Any]:
    if not isinstance(part, InputImage):
        return {"type": "text", "text": part.text}
    url = part.image_url
    if scanner.index_of(url) is None and not url.lower().startswith(URL_SCHEMES):
        raise bad_value(f"{name}.image_url", "expected a data:, http://, https:// or file:// URL")
    detail = "high" if part.detail == "original" else part.detail
    limits = {"min_pixels": part.min_pixels, "max_pixels": part.max_pixels}
    return {"type": "image_url", "image_url": {"url": url, "detail": detail, **limits}}
