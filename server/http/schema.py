"""What a chat request may say: pydantic models of the OpenAI API and its usual extensions. Called by `server/api/chat.py`.

A field is *known* (validated), *fixed* (known to OpenAI or to other servers, not implemented: only values that change nothing pass),
*harmless* (accepted and ignored), or *unknown* (the same, and named once in the log). To implement a fixed field, move it up to known.
"""

import logging
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError, field_validator, model_validator
from pydantic_core import from_json

from server.errors import RequestError

logger = logging.getLogger(__name__)

MAX_MESSAGES = 10_000
MAX_STOPS = 4
MAX_LOGGED_FIELDS = 100
TEMPLATE_KWARGS = frozenset({"enable_thinking", "add_vision_id"})

# Values of fields that are not implemented which mean "off": everything else would change the output and is refused.
FIXED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "use_beam_search": (False,),
    "echo": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
HARMLESS = frozenset({
    "store", "metadata", "user", "service_tier", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "prediction", "request_id", "priority", "spaces_between_special_tokens",
})  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class ImageUrl(_Model):
    """`detail` and anything else that clients add beside the URL is tolerated."""

    url: str


class TextPart(_Model):
    type: Literal["text"]
    text: str


class ImagePart(_Model):
    type: Literal["image_url"]
    image_url: ImageUrl

    @field_validator("image_url", mode="before")
    @classmethod
    def _from_bare_string(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str) else value


def _part_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>"


# Tags stand in angle brackets so that `_field_name` can tell them from fields.
Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image_url>")],
    Discriminator(_part_tag, custom_error_type="part_type", custom_error_message="content parts are of type 'text' or 'image_url'"),
]


def _content_tag(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


# Lists that a client may fill with very many bad values fail at the first one.
Parts = Annotated[list[Part], Field(fail_fast=True), Tag("<parts>")]
Content = Annotated[Parts | Annotated[str | None, Tag("<text>")], Discriminator(_content_tag)]


class Message(_Model):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: None = None

    @model_validator(mode="after")
    def _needs_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self


class StreamOptions(_Model):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ChatRequest(BaseModel):
    """The body of `POST /v1/chat/completions`. None means that the client left it to the checkpoint's defaults."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, lt=1 << 63)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default=[], max_length=MAX_STOPS)
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=1024)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    chat_template_kwargs: dict[str, bool] | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    timings: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: object) -> object:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    @field_validator("chat_template_kwargs", mode="before")  # the first bad name is enough: there may be very many
    @classmethod
    def _allowed_kwargs(cls, value: object) -> object:
        for name in value if isinstance(value, dict) else ():
            if name not in TEMPLATE_KWARGS:
                raise ValueError(f"'{name[:64]}' is not one of {', '.join(sorted(TEMPLATE_KWARGS))}")
        return value

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class UnknownFields:
    """Names each unknown field once in the log, and at most MAX_LOGGED_FIELDS of them: clients choose the names."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def note(self, name: str) -> None:
        if name not in self._seen and len(self._seen) < MAX_LOGGED_FIELDS:
            self._seen.add(name)
            logger.info("requests carry the unknown field %r, which is ignored", name[:100])


def parse_chat_request(data: bytes, unknown: UnknownFields) -> ChatRequest:
    """Validates a request. RequestError 400 names the field; `param` is its path, such as `messages.0.content`."""
    try:
        value = from_json(data)
    except ValueError as error:
        raise RequestError(400, f"The request body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise RequestError(400, "The request body must be a JSON object.")
    try:
        request = ChatRequest.model_validate(value)
    except ValidationError as error:
        raise _bad_value(error) from None
    _check_other_fields(request.model_extra or {}, unknown.note)
    return request


def _check_other_fields(extra: dict[str, Any], note: Callable[[str], None]) -> None:
    for name, value in extra.items():
        if name in FIXED:
            if value is not None and value not in FIXED[name]:
                raise RequestError(400, f"{name}: this value is not supported by this server.", name, "unsupported_value")
        elif name not in HARMLESS:
            note(name)


def _bad_value(error: ValidationError) -> RequestError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    name = _field_name(details[0]["loc"])
    message = details[0]["msg"].removeprefix("Value error, ")
    return RequestError(400, f"{name}: {message}", name, "invalid_value")


def _field_name(location: tuple[int | str, ...]) -> str:
    return ".".join(str(step)[:64] for step in location if not str(step).startswith("<")) or "body"
