"""`POST /v1/chat/completions` and `/v1/completions`."""

import json
from abc import abstractmethod
from typing import Any, Literal

import msgspec

from engine.wire.messages import AnyRef, ChatPrompt, Submit
from engine.wire.params import Temperature, TopP
from server.api.chat.endpoint import Endpoint, GenerationEndpoint, MakeFormat
from server.api.chat.format import ChatFormat, CompletionFormat
from server.api.http.body import Body
from server.api.http.reply import Reply
from server.api.http.scan import Scanner
from server.api.schema.media import ImagePart, MediaRefs
from server.api.schema.parts import Message, ProcessorKwargs, RefusalPart, TextPart, ToolCall
from server.api.schema.requests import ChatRequest, CompletionRequest, MediaRequest
from server.api.schema.validate import Open, check
from server.api.schema.video import video_reference


class ChatEndpoint(GenerationEndpoint):
    """An answer to messages with text and images."""

    takes: Any = ChatRequest
    prompt_field = "messages"

    def read(self, value: dict[str, Any], body: Body) -> Reply:
        return self.chat(self.check(ChatRequest, value), body, ChatFormat)

    def chat(self, request: ChatRequest, body: Body, format: MakeFormat) -> Reply:
        messages, media = read_conversation(request, request.messages, body)
        reply = self.reply_to(
            request,
            body,
            [chat_prompt(request, messages)],
            self.prompt_field,
            format,
            calls="none" if not request.uses_tools else "one" if request.parallel_tool_calls is False else "all",
            must_call=request.uses_tools and request.tool_choice not in (None, "auto"),
            called=request.called,
        )
        reply.submits[0].media = media
        return reply


class DialectRequest(Open):
    """A request in another dialect, with the fields that it shares with chat completions."""

    model: str | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    n: Literal[1] | None = None

    @abstractmethod
    def chat_body(self, scanner: Scanner) -> dict[str, Any]: ...

    def as_chat(self, names: set[str]) -> dict[str, Any]:
        """Return the shared fields, those of `names`, and unknown ones."""
        return {**(self.model_extra or {}), **self.model_dump(include=DialectRequest.model_fields.keys() | names, exclude_none=True)}


class TranslatedChat(ChatEndpoint):
    """An answer to a request in another dialect."""

    @abstractmethod
    def format_of(self, request: Any) -> MakeFormat: ...

    def read(self, value: dict[str, Any], body: Body) -> Reply:
        request: DialectRequest = check(self.takes, value)
        return self.chat(self.check(ChatRequest, request.chat_body(body.scanner)), body, self.format_of(request))


class CompletionEndpoint(GenerationEndpoint):
    """Continuations of texts or token ids."""

    takes = CompletionRequest

    def read(self, value: dict[str, Any], body: Body) -> Reply:
        request = self.check(CompletionRequest, value)
        reply = self.reply_to(request, body, request.prompts, "prompt", CompletionFormat, echo=bool(request.echo))
        _vary_seeds(reply.submits, request.seed)
        return reply


def _vary_seeds(submits: list[Submit], seed: int | None) -> None:
    for i, submit in enumerate(submits if seed is None else ()):
        submit.params = msgspec.structs.replace(submit.params, seed=(submit.params.seed + i) % (1 << 63))


ROUTES: dict[str, type[Endpoint]] = {
    "/v1/chat/completions": ChatEndpoint,
    "/v1/completions": CompletionEndpoint,
}


def chat_prompt(request: ChatRequest, messages: list[dict[str, object]]) -> ChatPrompt:
    return ChatPrompt(
        messages=msgspec.json.encode(messages),
        tools=msgspec.json.encode([tool.model_dump(exclude_none=True) for tool in request.functions]) if request.uses_tools else None,
        template_kwargs=request.template_kwargs,
        ending="continue" if request.continue_final_message else "none" if request.add_generation_prompt is False else "generation",
    )


def assistant_message(texts: list[str], thoughts: list[str], calls: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    return message | ({"reasoning": "".join(thoughts)} if thoughts else {}) | ({"tool_calls": calls} if calls else {})


def read_conversation(request: MediaRequest, messages: list[Message], body: Body) -> tuple[list[dict[str, object]], list[AnyRef]]:
    """Return the messages for the chat template, where a medium is an index into the second list, that of all media. RequestError 400."""
    refs, media = MediaRefs(body, request.cache_salt), list[AnyRef]()
    limits = request.mm_processor_kwargs or ProcessorKwargs()

    def read(part: Any, name: str) -> dict[str, object]:
        if isinstance(part, TextPart | RefusalPart):
            return {"type": "text", "text": part.text}
        is_image = isinstance(part, ImagePart)
        media.append(part.reference(name, refs, limits) if isinstance(part, ImagePart) else video_reference(part, name, refs, limits))
        return {"type": "image" if is_image else "video", "media": len(media) - 1}

    shown: list[dict[str, object]] = []
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content: object = message.content or ""
        if isinstance(message.content, list):
            content = [read(part, f"messages.{i}.content.{j}") for j, part in enumerate(message.content)]
        entry: dict[str, object] = {"role": role, "content": content}
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = reasoning
        if message.tool_calls:
            entry["tool_calls"] = [_read_call(call) for call in message.tool_calls]
        shown.append(entry)
    return shown, media


def _read_call(call: ToolCall) -> dict[str, object]:
    """Return a call for the template: its arguments as an object, or as text if they are not valid JSON."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
