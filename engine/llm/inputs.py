"""JSON bodies of the API from conversations and prompts in Python. Pictures become `data:` URIs."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pybase64
from PIL import Image

from engine.llm.outputs import CompletionOutput, RequestOutput
from models.config.types import MEDIA_KINDS

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PICTURE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that PNG supports
URL_SCHEMES = ("data:", "http://", "https://", "file://")

SamplingParams = dict[str, Any]  # by vLLM's names (docs/fields.md); omitted ones follow the checkpoint's recommendation
StructuredOutputsParams = dict[str, Any]  # with one member


@dataclass(frozen=True, slots=True)
class Ask:
    """Prompt `number` of a list: a conversation, a text, or token ids. `fields` are further fields of the API, and `lora`, the name of an
    adapter."""

    path: str
    prompt: Any
    params: Mapping[str, Any] | None
    fields: Mapping[str, Any]
    number: int = 0

    def output(self, num_answers: int = 0, error: Exception | None = None) -> RequestOutput:
        return RequestOutput(self.prompt, self.number, [CompletionOutput(index) for index in range(num_answers)], error=error)

    def body(self) -> dict[str, Any]:
        """Return the JSON body. Raises ValueError or OSError."""
        prompt, fields = self.prompt, dict(self.params or {})
        if self.path == CHAT and "logprobs" in fields:
            fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        if self.path != EMBEDDINGS:
            fields["return_token_ids"] = True
        fields |= self.fields
        if (adapter := fields.pop("lora", None)) is not None:
            fields["model"] = adapter
        if self.path == CHAT and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        if is_conversation(prompt):
            return {**fields, "messages": [_message_json(message) for message in prompt]}
        if self.path == CHAT:
            raise ValueError(f"a conversation must be a string or a list of messages with a role, not {type(prompt).__name__}")
        return {**fields, "input" if self.path == EMBEDDINGS else "prompt": prompt}


def is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def listed(prompts: Any) -> list[Any]:
    """Return the prompts of a list, or the one given prompt: a text, token ids, or a conversation."""
    is_ids = isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
    return [prompts] if isinstance(prompts, str | Mapping) or is_ids or is_conversation(prompts) else list(prompts)


def _message_json(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    return {**message, "content": list(map(_part_json, content))} if isinstance(content, list | tuple) else dict(message)


def _part_json(part: Any) -> dict[str, Any]:
    """Return the part of a message for a text, a picture, or a dictionary as the API, vLLM or transformers have it."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    others = dict(part) if isinstance(part, Mapping) else {"image": part}
    kind = next((kind for kind in MEDIA_KINDS if str(others.get("type", "")).startswith(kind)), "image")
    key = next((key for key in (f"{kind}_url", "image_pil", kind, "url", "path") if key in others), None)
    if key is None:
        return others
    value = others.pop(key)
    if kind != "image" and isinstance(value, list | tuple):
        return {**others, kind: [media_url(frame) for frame in value]}
    url = {**value, "url": media_url(value.get("url"))} if isinstance(value, Mapping) else media_url(value)
    return {**others, "type": f"{kind}_url", f"{kind}_url": url}


def media_url(medium: Any) -> str | None:
    """Return the URL of a PIL image (lossless), the bytes of a file, or a path. URLs and None are unchanged."""
    if medium is None or (isinstance(medium, str) and medium.lower().startswith(URL_SCHEMES)):
        return medium
    if isinstance(medium, Image.Image):
        (medium if medium.mode in PICTURE_MODES else medium.convert("RGB")).save(file := io.BytesIO(), "PNG", compress_level=1)
        medium = file.getvalue()
    elif isinstance(medium, str | os.PathLike):
        medium = Path(medium).expanduser().read_bytes()
    elif not isinstance(medium, bytes | bytearray):
        raise ValueError(f"an image must be a PIL image, bytes, a path or a URL, not {type(medium).__name__}")
    return f"data:;base64,{pybase64.b64encode_as_string(medium)}"


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Format keyword arguments as a command line: `prefix_cache=False` is `--no-prefix-cache`, a dictionary is JSON or pairs."""
    words: list[str] = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name}")
        elif name == "lora_modules" and isinstance(value, Mapping):
            words.append(f"--{name}={' '.join(f'{adapter}={folder}' for adapter, folder in value.items())}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, Mapping) else ",".join(value) if isinstance(value, list | tuple) else value
            words.append(f"--{name}={text}")
    return words
