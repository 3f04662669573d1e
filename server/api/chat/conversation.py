"""Messages of a request in the processor's terms, and the media that they name."""

import hashlib
import json
from dataclasses import dataclass

from engine.messages import API_ARENA, MediaRef, Region
from server.api.chat.parts import ImagePart, Message, PixelLimits, RefusalPart, TextPart
from server.api.chat.tools import CustomCall, ToolCall
from server.api.fields import LIMITED_IN_IMAGES, check_limited
from server.http.body import Body
from server.http.scan import Scanner
from server.http.validate import bad_value

URL_SCHEMES = ("http://", "https://", "file://", "data:")


@dataclass(slots=True)
class Conversation:
    """What the chat template renders, and the images in the order in which it shows them."""

    messages: list[dict[str, object]]
    media: list[MediaRef]
    used_references: set[int]  # of the scanner's


def check_url(url: str, scanner: Scanner, path: str) -> None:
    """RequestError 400 for a URL that no loader knows."""
    if scanner.index_of(url) is None and not url.lower().startswith(URL_SCHEMES):
        raise bad_value(path, "expected a data:, http://, https:// or file:// URL")


def locate(url: str, path: str, body: Body, used: set[int]) -> tuple[Region | None, str | None]:
    """A payload in the api's arena, whose reference is now a used one, or a URL. RequestError 400 for one that no loader knows."""
    check_url(url, body.scanner, path)
    index = body.scanner.index_of(url)
    if index is None:
        return None, url
    used.add(index)
    reference = body.scanner.references[index]
    return Region(API_ARENA, body.region.offset + reference.offset, reference.length), None


def read_conversation(messages: list[Message], body: Body, salt: str | None, limits: PixelLimits | None) -> Conversation:
    """Replaces every image part by an index into the media; `limits` are of the whole request. Names of images are apart for each key that
    clients send, and for each salt. RequestError 400 for a URL that no loader knows."""
    limits = limits or PixelLimits()
    owner = hashlib.sha256(body.credentials).digest() + hashlib.sha256((salt or "").encode()).digest()
    conversation = Conversation([], [], set())
    for i, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content: object = message.content or ""
        if isinstance(message.content, list):
            parts = enumerate(message.content)
            content = [_read_part(part, f"messages.{i}.content.{j}", body, owner, conversation, limits) for j, part in parts]
        entry: dict[str, object] = {"role": role, "content": content}
        reasoning = message.reasoning_content or message.reasoning
        if reasoning is not None:
            entry["reasoning_content"] = reasoning
        if message.tool_calls:
            entry["tool_calls"] = [_read_call(call) for call in message.tool_calls]
        conversation.messages.append(entry)
    return conversation


def _read_call(call: ToolCall | CustomCall) -> dict[str, object]:
    """Templates take arguments apart where they are an object; what the model once got wrong stays text."""
    if isinstance(call, CustomCall):
        return {"type": "function", "function": {"name": call.custom.name, "arguments": {"input": call.custom.input}}}
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}


def _read_part(
    part: TextPart | RefusalPart | ImagePart, name: str, body: Body, owner: bytes, conversation: Conversation, limits: PixelLimits
) -> dict[str, object]:
    if not isinstance(part, ImagePart):
        return {"type": "text", "text": part.text}
    url = part.image_url.url
    for extra, prefix in ((part.image_url.model_extra, f"{name}.image_url."), (part.model_extra, f"{name}.")):
        check_limited(extra or {}, LIMITED_IN_IMAGES, prefix)
    if url is None and part.uuid is None:
        raise bad_value(f"{name}.image_url", "may be null beside a `uuid` only")
    payload = None
    if url is not None:
        payload, url = locate(url, f"{name}.image_url.url", body, conversation.used_references)
    least, most, cap = part.limits(limits)
    image_name = None if part.uuid is None else hashlib.sha256(owner + part.uuid.encode()).digest()
    conversation.media.append(MediaRef(payload, url, least, most, image_name, cap))
    return {"type": "image", "media": len(conversation.media) - 1}
