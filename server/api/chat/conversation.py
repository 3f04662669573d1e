"""Conversion of a request's messages for the processor, with the media that they name."""

import json
from typing import Any

from engine.wire.messages import AnyRef
from server.api.http.body import Body
from server.api.schema.media import MediaRefs
from server.api.schema.parts import MEDIA, Message, ProcessorKwargs, RefusalPart, TextPart
from server.api.schema.requests import MediaRequest
from server.api.schema.tools import ToolCall


def read_conversation(request: MediaRequest, messages: list[Message], body: Body) -> tuple[list[dict[str, object]], list[AnyRef]]:
    """Return the messages for the chat template, where a medium is an index into the second list, that of all media. RequestError 400."""
    refs, media = MediaRefs(body, request.cache_salt), list[AnyRef]()
    limits = request.mm_processor_kwargs or ProcessorKwargs()

    def read(part: Any, name: str) -> dict[str, object]:
        if isinstance(part, TextPart | RefusalPart):
            return {"type": "text", "text": part.text}
        kind, reference = MEDIA[type(part)]
        media.append(reference(part, name, refs, limits))
        return {"type": kind, "media": len(media) - 1}

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
