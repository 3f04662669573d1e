"""JSON of the API: requests from conversations and prompts in Python, whose pictures become `data:` URIs, and outputs by vLLM's names."""

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pybase64
from PIL import Image

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
NAMES = {CHAT: "messages", COMPLETIONS: "prompt", EMBEDDINGS: "input"}  # fields of prompts
PICTURE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that PNG supports
MEDIA_NAMES = {"image", "image_url", "video", "video_url", "url"}  # members of parts
URL_SCHEMES = ("data:", "http://", "https://", "file://")

Json = dict[str, Any]
SamplingParams = dict[str, Any]  # by vLLM's names (docs/fields.md); omitted ones follow the checkpoint's recommendation


def body_of(path: str, prompt: Any, params: Mapping[str, Any] | None, fields: Json) -> Json:
    """Return the JSON body of a request for a conversation, a text, or token ids. `fields` are further fields of the API, and `lora`, the
    name of an adapter. Raises OSError."""
    body = dict(params or {})
    if path == CHAT and "logprobs" in body:
        body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
    if path != EMBEDDINGS:
        body["return_token_ids"] = True
    body |= fields
    if (adapter := body.pop("lora", None)) is not None:
        body["model"] = adapter
    if path == CHAT and isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if is_conversation(prompt):
        return {**body, "messages": [{**message, "content": _content(message.get("content"))} for message in prompt]}
    return {**body, NAMES[path]: prompt}


def is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def listed(prompts: Any) -> list[Any]:
    """Return the prompts of a list, or the one given prompt: a text, token ids, or a conversation."""
    is_ids = isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
    return [prompts] if isinstance(prompts, str | Mapping) or is_ids or is_conversation(prompts) else list(prompts)


def _content(content: Any) -> Any:
    if not isinstance(content, list | tuple):
        return content
    parts = ({"type": "text", "text": part} if isinstance(part, str) else part for part in content)
    return [_json(part if isinstance(part, Mapping) else {"type": "image", "image": part}) for part in parts]


def _json(value: Any, name: str = "") -> Any:
    """Replace pictures (PIL images, bytes of files, paths) in a part by URLs. `name`: the member that has the value."""
    if isinstance(value, Mapping):
        return {member: _json(one, member) for member, one in value.items()}
    if isinstance(value, list | tuple):
        return [_json(one, name) for one in value]
    if isinstance(value, Image.Image):
        (value if value.mode in PICTURE_MODES else value.convert("RGB")).save(file := io.BytesIO(), "PNG", compress_level=1)
        value = file.getvalue()
    elif isinstance(value, os.PathLike) or (name in MEDIA_NAMES and isinstance(value, str) and not value.lower().startswith(URL_SCHEMES)):
        value = Path(value).expanduser().read_bytes()
    return f"data:;base64,{pybase64.b64encode_as_string(value)}" if isinstance(value, bytes | bytearray) else value


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` excludes reasoning and tool calls; `tool_calls` and `logprobs` are JSON of the API."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[Json] = field(default_factory=list)
    logprobs: Json | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, choice: Json) -> None:
        """Add a choice of a document, or of a part of a stream."""
        message = choice.get("delta") or choice.get("message") or choice
        self.text += message.get("content") or message.get("text") or ""
        self.reasoning += message.get("reasoning") or ""
        for call in message.get("tool_calls") or ():
            if call.pop("index", len(self.tool_calls)) == len(self.tool_calls):
                self.tool_calls.append(call)
            else:
                self.tool_calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        self.token_ids += choice.get("token_ids") or ()
        for name, entries in (choice.get("logprobs") or {}).items():
            self.logprobs = self.logprobs or {}
            self.logprobs[name] = (self.logprobs.get(name) or []) + (entries or [])
        self.finish_reason, self.stop_reason = choice.get("finish_reason"), choice.get("stop_reason")


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]  # a unit vector


@dataclass(slots=True)
class RequestOutput:
    """The `n` answers to a prompt, or its embedding. A failed request has an `error` and no outputs."""

    prompt: Any
    outputs: Any  # list of CompletionOutput, or EmbeddingOutput
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Json | None] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return isinstance(self.outputs, EmbeddingOutput) or all(output.finish_reason for output in self.outputs)

    def add(self, choice: Json, document: Json) -> None:
        if "embedding" in choice:
            self.outputs = EmbeddingOutput(choice["embedding"])
        else:
            self.outputs[choice["index"]].add(choice)
        head = document | choice
        self.prompt_token_ids = head.get("prompt_token_ids") or self.prompt_token_ids
        self.prompt_logprobs = head.get("prompt_logprobs") or self.prompt_logprobs
        if usage := document.get("usage"):
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
