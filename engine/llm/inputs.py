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

from engine.llm.params import SamplingParams

CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic")
URL_SCHEMES = ("data:", "http://", "https://", "file://")
PICTURE_KEYS = ("image_url", "image_pil", "image", "url", "path")
VIDEO_KEYS = ("video_url", "video", "url", "path")


@dataclass(frozen=True, slots=True)
class Ask:
    """One prompt: a conversation, a text, or token ids."""

    path: str
    prompt: Any
    params: SamplingParams
    fields: Mapping[str, Any]

    @property
    def is_text(self) -> bool:
        """Return whether it contains neither pictures nor files."""
        if not is_conversation(self.prompt):
            return not isinstance(self.prompt, Mapping)
        return all(isinstance(message, Mapping) and isinstance(message.get("content", ""), str) for message in self.prompt)

    def may_join(self, other: "Ask") -> bool:
        """Return whether both may be in one request."""
        is_alike = self.path == other.path != EMBEDDINGS and self.params is other.params and self.params.prompt_logprobs is None
        return is_alike and self.is_text and other.is_text

    def value(self) -> dict[str, Any]:
        """Return the JSON body. Raises ValueError or OSError."""
        given = {"return_token_ids": True, **self.params.as_fields(self.path == CHAT)} if self.path != EMBEDDINGS else {}
        prompt, fields = self.prompt, {**given, **self.fields}
        if self.path == CHAT or is_conversation(prompt):
            messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            if not is_conversation(messages):
                raise ValueError(f"a conversation is a text or a list of messages with a role, not {type(prompt).__name__}")
            return {**fields, "messages": [_message_json(message) for message in messages]}
        if isinstance(prompt, Mapping):
            if set(data := prompt.get("multi_modal_data") or {}) - {"image"}:
                raise ValueError("multi_modal_data of a prompt has pictures only, as `image`: use `chat` for videos")
            images = data.get("image", ())
            fields["images"] = [picture_url(image) for image in (images if isinstance(images, list | tuple) else [images])]
            prompt = prompt["prompt_token_ids"] if prompt.get("prompt") is None else prompt["prompt"]
        if not isinstance(prompt, str | Sequence):
            raise ValueError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
        return {**fields, "input" if self.path == EMBEDDINGS else "prompt": prompt}


def embedding_of(prompt: Any, fields: Mapping[str, Any]) -> Ask:
    return Ask(EMBEDDINGS, prompt, SamplingParams(), {**fields, "encoding_format": "base64"})


def is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def listed(prompts: Any) -> list[Any]:
    """Return the prompts of a list, or the one given prompt: a text, token ids, a conversation, or a dictionary with pictures."""
    is_ids = isinstance(prompts, Sequence) and len(prompts) > 0 and isinstance(prompts[0], int)
    return [prompts] if isinstance(prompts, str | Mapping) or is_ids or is_conversation(prompts) else list(prompts)


def _message_json(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    return {**message, "content": [_part_json(part) for part in (content if isinstance(content, list | tuple) else [content])]}


def _part_json(part: Any) -> Any:
    if isinstance(part, str) and not _names_picture(part):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        return {"type": "image_url", "image_url": {"url": picture_url(part)}}
    kind, keys = ("video", VIDEO_KEYS) if str(part.get("type", "")).startswith("video") else ("image", PICTURE_KEYS)
    key = next((key for key in keys if key in part), None)
    if key is None:
        return dict(part)
    others = {name: value for name, value in part.items() if name not in (key, "type")}
    if kind == "video" and isinstance(part[key], list | tuple):
        return {"type": kind, kind: [picture_url(frame) for frame in part[key]], **others}
    given = part[key] if isinstance(part[key], Mapping) else {"url": part[key]}
    return {"type": f"{kind}_url", f"{kind}_url": {**given, "url": picture_url(given.get("url"), kind)}, **others}


def _names_picture(text: str) -> bool:
    """Return whether a part of a message is a URL or a path. Raises FileNotFoundError if only its suffix is a picture's."""
    if text.lower().startswith(URL_SCHEMES):
        return len(text.split()) == 1
    path = Path(text).expanduser()
    if (path.suffix or os.sep in text) and os.path.isfile(path):
        return True
    if text.lower().endswith(PICTURE_SUFFIXES):
        raise FileNotFoundError(f"there is no picture {text!r}; a text that ends like this is a part {{'type': 'text', 'text': ...}}")
    return False


def picture_url(picture: Any, kind: str = "image") -> str | None:
    """Return the URL of a PIL image (lossless), of the bytes of a file, or of a path. URLs and None, for a `uuid`, are unchanged."""
    if picture is None or (isinstance(picture, str) and picture.lower().startswith(URL_SCHEMES)):
        return picture
    if isinstance(picture, Image.Image):
        file = io.BytesIO()
        is_plain = picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
        (picture if is_plain else picture.convert("RGB")).save(file, "PNG", compress_level=1)
        data = file.getvalue()
    elif isinstance(picture, bytes | bytearray):
        data = bytes(picture)
    elif isinstance(picture, str | os.PathLike):
        data = Path(picture).expanduser().read_bytes()
    else:
        raise ValueError(f"a picture is a PIL image, bytes, a path or a URL, not {type(picture).__name__}")
    return f"data:{kind}/unknown;base64,{pybase64.b64encode_as_string(data)}"


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
