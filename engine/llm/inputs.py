"""JSON bodies of the API from conversations and prompts in Python. Pictures become `data:` URIs."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pybase64
from PIL import Image

from engine.llm.outputs import CompletionOutput, EmbeddingRequestOutput, RequestOutput
from engine.wire.params import PARAMETERS
from models.config.types import MEDIA_KINDS

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic")
PICTURE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # modes that PNG supports
URL_SCHEMES = ("data:", "http://", "https://", "file://")
FIELDS = (  # of SamplingParams
    *("n", "stop", "include_stop_str_in_output", "skip_special_tokens", "logprobs", "truncate_prompt_tokens", "priority"),
    *("structured_outputs", "extra", *PARAMETERS),
)

StructuredOutputsParams = dict[str, Any]  # with one member; `json` may be a pydantic class


class SamplingParams(SimpleNamespace):
    """Sampling parameters by vLLM's names (docs/fields.md). Omitted ones are None and follow the checkpoint's recommendation, as over HTTP.
    Without `max_tokens`, a chat answer is limited by the context only, and a text completion has 16 tokens. `extra`: further fields of the
    API."""

    def __init__(self, **fields: Any):
        if unknown := sorted(fields.keys() - FIELDS):
            raise TypeError(f"SamplingParams has no {', '.join(unknown)}: `extra` holds further fields of the API")
        super().__init__(**dict.fromkeys(FIELDS) | fields)

    def as_fields(self, is_chat: bool) -> dict[str, Any]:
        given = {name: value for name, value in vars(self).items() if value is not None}
        if is_chat and self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        extra = given.pop("extra", {})
        return {"return_token_ids": True, **given, **extra}


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt, number `number` of a list: a conversation, a text, or token ids. `fields` are further fields of the API, and `lora`, the
    name of an adapter."""

    path: str
    prompt: Any
    params: SamplingParams | None
    fields: Mapping[str, Any]
    number: int = 0

    def output(self, num_answers: int = 0, error: Exception | None = None) -> RequestOutput | EmbeddingRequestOutput:
        if self.path == EMBEDDINGS:
            return EmbeddingRequestOutput(self.prompt, self.number, error=error)
        return RequestOutput(self.prompt, self.number, [CompletionOutput(index) for index in range(num_answers)], error=error)

    def body(self) -> dict[str, Any]:
        """Return the JSON body. Raises ValueError or OSError."""
        is_embedding, params = self.path == EMBEDDINGS, self.params or SamplingParams()
        given = {"encoding_format": "base64"} if is_embedding else params.as_fields(self.path == CHAT)
        prompt, fields = self.prompt, {**given, **self.fields}
        if (adapter := fields.pop("lora", None)) is not None:
            fields["model"] = adapter
        if self.path == CHAT or is_conversation(prompt):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if not is_conversation(messages):
                raise ValueError(f"a conversation must be a string or a list of messages with a role, not {type(prompt).__name__}")
            return {**fields, "messages": [_message_json(message) for message in messages]}
        if isinstance(prompt, Mapping):
            if set(data := prompt.get("multi_modal_data") or {}) - {"image"}:
                raise ValueError("multi_modal_data supports only images (key `image`): use `chat` for other media")
            fields["images"] = [media_url(image) for image in _list_of(data.get("image", ()))]
            prompt = prompt["prompt_token_ids"] if prompt.get("prompt") is None else prompt["prompt"]
        return {**fields, "input" if is_embedding else "prompt": prompt}


def is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def listed(prompts: Any) -> list[Any]:
    """Return the prompts of a list, or the one given prompt: a text, token ids, a conversation, or a dictionary with pictures."""
    is_ids = isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
    return [prompts] if isinstance(prompts, str | Mapping) or is_ids or is_conversation(prompts) else list(prompts)


def _list_of(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _message_json(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    return {**message, "content": [_part_json(part) for part in _list_of(content)]}


def _part_json(part: Any) -> dict[str, Any]:
    """Return the part of a message for a text, a picture, or a dictionary as vLLM or transformers have it."""
    if isinstance(part, str) and not _names_picture(part):
        return {"type": "text", "text": part}
    others = dict(part) if isinstance(part, Mapping) else {"image": part}
    kind = next((kind for kind in MEDIA_KINDS if str(others.get("type", "")).startswith(kind)), "image")
    for key in (f"{kind}_url", "image_pil", kind, "url", "path"):
        if key in others:
            value = others.pop(key)
            if kind != "image" and isinstance(value, list | tuple):
                return {**others, kind: [media_url(frame) for frame in value]}
            url = {**value, "url": media_url(value.get("url"))} if isinstance(value, Mapping) else media_url(value)
            return {**others, "type": f"{kind}_url", f"{kind}_url": url}
    return others


def _names_picture(text: str) -> bool:
    """Return whether a part of a message is a URL or a path. Raises FileNotFoundError if only its suffix is a picture's."""
    if text.lower().startswith(URL_SCHEMES):
        return len(text.split()) == 1
    path = Path(text).expanduser()
    if (path.suffix or os.sep in text) and os.path.isfile(path):
        return True
    if text.lower().endswith(PICTURE_SUFFIXES):
        raise FileNotFoundError(f"there is no image file {text!r}; to send this text itself, use {{'type': 'text', 'text': ...}}")
    return False


def media_url(medium: Any) -> str | None:
    """Return the URL of a PIL image (lossless), of the bytes of a file, or of a path. URLs and None, for a `uuid`, are unchanged."""
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
    """Format keyword arguments as a command line: `prefix_cache=False` is `--no-prefix-cache`, a dictionary is JSON."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{flag}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, Mapping) else ",".join(value) if isinstance(value, list | tuple) else value
            words.append(f"--{flag}={text}")
    return words
