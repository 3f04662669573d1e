"""Conversations and prompts as a program holds them, to JSON bodies of the API. Pictures become `data:` URIs."""

import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pybase64
from PIL import Image

from engine.llm.params import SamplingParams

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]

CHAT, COMPLETIONS, EMBEDDINGS, WITH_PICTURES = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/generate"
NATIVE_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
DEFAULT_TOKENS = 16
PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic")
URL_SCHEMES = ("data:", "http://", "https://", "file://")
PICTURE_KEYS = ("image_url", "image_pil", "image", "url", "path")
VIDEO_KEYS = ("video_url", "video", "url", "path")


@dataclass(frozen=True, slots=True)
class Ask:
    """One request to an endpoint: `prompt` is a conversation, a text or token ids."""

    asked: str
    prompt: Any
    params: SamplingParams
    fields: Mapping[str, Any]

    @property
    def path(self) -> str:
        has_pictures = self.asked == COMPLETIONS and isinstance(self.prompt, Mapping) and self.prompt.get("multi_modal_data")
        return WITH_PICTURES if has_pictures else self.asked

    @property
    def reads_files(self) -> bool:
        return self.path in (CHAT, WITH_PICTURES) or _is_conversation(self.prompt)

    def value(self) -> dict[str, Any]:
        """The JSON body. Reads and encodes the pictures of a conversation, in a thread. Raises ValueError or OSError."""
        given = {} if self.path == EMBEDDINGS else {"return_token_ids": True, **self.params.as_fields(is_chat=self.path == CHAT)}
        if self.path == WITH_PICTURES:
            return _native_json(self.prompt, {**given, **self.fields})
        if self.reads_files:
            return {**given, **self.fields, "messages": [_message_json(message) for message in _messages_of(self.prompt)]}
        return {**given, **self.fields, "input" if self.path == EMBEDDINGS else "prompt": _prompt_json(self.prompt)}


def conversations_of(messages: Sequence[Any]) -> list[Any]:
    """List of conversations: the given one, or each of the given list. A text is a conversation of one question."""
    return [messages] if isinstance(messages, str) or _is_conversation(messages) else list(messages)


def prompts_of(prompts: Any) -> list[Any]:
    """The same of texts, lists of token ids and conversations."""
    is_one = isinstance(prompts, str | Mapping) or _is_conversation(prompts) or (len(prompts) > 0 and isinstance(prompts[0], int))
    return [prompts] if is_one else list(prompts)


def _is_conversation(prompt: Any) -> bool:
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping) and "role" in prompt[0]


def _messages_of(conversation: Any) -> Sequence[Message]:
    """Raises ValueError."""
    if isinstance(conversation, str):
        return [{"role": "user", "content": conversation}]
    if not _is_conversation(conversation):
        raise ValueError(f"a conversation is a text or a list of messages with a role, not {type(conversation).__name__}")
    messages: Sequence[Message] = conversation
    return messages


def _message_json(message: Message) -> dict[str, Any]:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return dict(message)
    parts = content if isinstance(content, list | tuple) else [content]
    return {**message, "content": [_part_json(part) for part in parts]}


def _part_json(part: Any) -> Any:
    if isinstance(part, str) and not _names_picture(part):
        return {"type": "text", "text": part}
    if not isinstance(part, Mapping):
        return {"type": "image_url", "image_url": {"url": picture_url(part)}}
    is_video = str(part.get("type", "")).startswith("video")
    key = next((key for key in (VIDEO_KEYS if is_video else PICTURE_KEYS) if key in part), None)
    if key is None:
        return dict(part)
    others = {name: value for name, value in part.items() if name not in (key, "type")}
    if is_video and isinstance(part[key], list | tuple):
        return {"type": "video", "video": [picture_url(frame) for frame in part[key]], **others}
    given = part[key] if isinstance(part[key], Mapping) else {"url": part[key]}
    kind = "video_url" if is_video else "image_url"
    return {"type": kind, kind: {**given, "url": picture_url(given.get("url"), "video" if is_video else "image")}, **others}


def _names_picture(text: str) -> bool:
    """Whether a string among the parts of a message is a URL, or the path of a file, rather than text. Raises FileNotFoundError if it ends
    like the name of a picture and there is no such file."""
    if text.lower().startswith(URL_SCHEMES):
        return len(text.split()) == 1
    path = Path(text).expanduser()
    if (path.suffix or os.sep in text) and os.path.isfile(path):
        return True
    if text.lower().endswith(PICTURE_SUFFIXES):
        raise FileNotFoundError(f"there is no picture {text!r}; a text that ends like this is a part {{'type': 'text', 'text': ...}}")
    return False


def picture_url(picture: Any, kind: str = "image") -> str | None:
    """Of a PIL image (without loss), the bytes of a file, a path, or a URL, which the engine fetches. None stays: a `uuid` names it."""
    if picture is None or (isinstance(picture, str) and picture.lower().startswith(URL_SCHEMES)):
        return picture
    if isinstance(picture, Image.Image):
        data = _png(picture)
    elif isinstance(picture, bytes | bytearray):
        data = bytes(picture)
    elif isinstance(picture, str | os.PathLike):
        data = Path(picture).expanduser().read_bytes()
    else:
        raise ValueError(f"a picture is a PIL image, bytes, a path or a URL, not {type(picture).__name__}")
    return f"data:{kind}/unknown;base64,{pybase64.b64encode_as_string(data)}"


def _png(picture: Image.Image) -> bytes:
    """At the least effort: it is read again at once."""
    file = io.BytesIO()
    is_plain = picture.mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")
    (picture if is_plain else picture.convert("RGB")).save(file, "PNG", compress_level=1)
    return file.getvalue()


def _prompt_json(prompt: Any) -> str | list[int]:
    if isinstance(prompt, Mapping):
        prompt = prompt["prompt"] if prompt.get("prompt") is not None else prompt.get("prompt_token_ids")
    if not isinstance(prompt, str | Sequence):
        raise ValueError(f"a prompt is a text or a list of token ids, not {type(prompt).__name__}")
    return prompt if isinstance(prompt, str) else list(prompt)


def _native_json(prompt: Mapping[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """A prompt with placeholders of pictures, `multi_modal_data: {"image": ...}`, in the dialect that takes both. Raises ValueError."""
    data = prompt["multi_modal_data"]
    if set(data) != {"image"}:
        raise ValueError("multi_modal_data of a prompt has pictures only, as `image`: use `chat` for videos")
    images = data["image"] if isinstance(data["image"], list | tuple) else [data["image"]]
    text, logprobs = _prompt_json(prompt), given.pop("logprobs", None)
    sampling = {NATIVE_NAMES.get(name, name): value for name, value in given.items() if name != "return_token_ids"}
    return {
        "text" if isinstance(text, str) else "input_ids": text,
        "image_data": [picture_url(image) for image in images],
        "sampling_params": {"max_new_tokens": DEFAULT_TOKENS} | sampling,
        **({} if logprobs is None else {"return_logprob": True, "top_logprobs_num": logprobs}),
    }


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as the words of a command line: `prefix_cache=False` is `--no-prefix-cache`, a dict is JSON."""
    words: list[str] = []
    for name, value in flags.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            text = json.dumps(value) if isinstance(value, Mapping) else ",".join(value) if isinstance(value, list | tuple) else value
            words.append(f"--{flag}={text}")
    return words
