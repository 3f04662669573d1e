"""What requests may say: the fields that are read, as strict types. Used by the other files of this folder.

None means that the client left it to the checkpoint's defaults. Fields that are not read here are the business of `server/api/fields.py`.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from engine.params import MAX_ALLOWED_TOKENS, MAX_BAD_WORDS, MAX_TOP_LOGPROBS
from server.api.fields import LIMITED_IN_IMAGES, check_limited
from server.http.validate import Strict, bad_value

LOW_DETAIL_PIXELS = 512 * 512
MAX_MESSAGES = 10_000
MAX_STOPS, MAX_STOP_CHARACTERS = 4, 4096  # beginnings of one are looked for at every token
MAX_TIMEOUT_S = 86_400
MAX_TOOLS = 1024
MAX_PROMPTS = 128
MAX_ANSWERS = 16
MAX_BIASED, MAX_STOP_IDS = 500, 256  # with the bad words they stay below MAX_LOGIT_EDITS
DEFAULT_COMPLETION_TOKENS = 16  # as OpenAI has it
TEMPLATE_KWARGS = frozenset({"enable_thinking", "add_vision_id"})

TokenCount = Annotated[int, Field(ge=1, lt=1 << 63)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]


class PixelLimits(Strict):
    """The area of an image after resizing; None is the checkpoint's own limit."""

    min_pixels: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    max_pixels: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None


class ProcessorKwargs(PixelLimits):
    """For all images of a request. What else there may be for other models is refused."""

    model_config = ConfigDict(extra="forbid")


class ImageUrl(PixelLimits):
    """Where the image is. What clients add is tolerated if it changes nothing: see LIMITED_IN_IMAGES.

    `detail: low` is at most LOW_DETAIL_PIXELS, `high` and `auto` are as the checkpoint has it."""

    model_config = ConfigDict(extra="allow")

    url: str | None
    detail: Literal["auto", "low", "high"] | None = None


class TextPart(Strict):
    type: Literal["text", "input_text"]
    text: str


class RefusalPart(Strict):
    """Of an assistant's message in a history."""

    type: Literal["refusal"]
    text: str = Field(alias="refusal")


class ImagePart(PixelLimits):
    """With a `uuid`, the URL may be null the next time."""

    model_config = ConfigDict(extra="allow")

    type: Literal["image_url", "input_image"]
    image_url: ImageUrl
    uuid: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    @field_validator("image_url", mode="before")
    @classmethod
    def _from_bare_string(cls, value: object) -> object:
        return {"url": value} if isinstance(value, str | None) else value

    def limits(self, others: PixelLimits) -> tuple[int | None, int | None, int | None]:
        """Least and most pixels: what stands nearest to the image counts, `others` last. And what low detail bounds it by besides."""
        told = (self.image_url, self, others)
        least = next((one.min_pixels for one in told if one.min_pixels is not None), None)
        most = next((one.max_pixels for one in told if one.max_pixels is not None), None)
        return least, most, LOW_DETAIL_PIXELS if self.image_url.detail == "low" else None


TEXT_PARTS, IMAGE_PARTS = ("text", "input_text"), ("image_url", "input_image")


def _part_tag(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<text>" if kind in TEXT_PARTS else "<image>" if kind in IMAGE_PARTS else f"<{kind}>"


# Tags stand in angle brackets so that validation can tell them from fields.
Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[RefusalPart, Tag("<refusal>")] | Annotated[ImagePart, Tag("<image>")],
    Discriminator(_part_tag, custom_error_type="part_type", custom_error_message="content parts are of type 'text' or 'image_url'"),
]


def _content_tag(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


# Lists that a client may fill with very many bad values fail at the first one.
Parts = Annotated[list[Part], Field(fail_fast=True), Tag("<parts>")]
Content = Annotated[Parts | Annotated[str | None, Tag("<text>")], Discriminator(_content_tag)]


class CalledFunction(Strict):
    name: str
    arguments: Any = ""

    @field_validator("arguments")
    @classmethod
    def _text_or_object(cls, value: object) -> object:
        if not isinstance(value, str | dict):
            raise ValueError("must be a string of JSON")
        return value


class ToolCall(Strict):
    """A call that the assistant has made, in a history."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: None = None

    @model_validator(mode="after")
    def _needs_content(self) -> "Message":
        if self.content is None and self.role not in ("assistant", "tool"):
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self


class FunctionDefinition(Strict):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(Strict):
    """What chat and text completions have in common. Fields that it lacks are in `model_extra`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]] = Field(default=[], max_length=MAX_STOPS)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for it
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    regex: Any = None
    ebnf: Any = None
    json_schema: Any = None
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASED)] | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MAX_BAD_WORDS // 2)] | None = None
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKENS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    timings: bool | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S)] | None = None
    user: str | None = None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are told beside each token; None: not even its own log-probability."""
        return None

    @field_validator("stop", mode="before")
    @classmethod
    def _stop_list(cls, value: object) -> object:
        if value is None:
            return []
        return [value] if isinstance(value, str) else value

    def check_together(self, vocab_size: int) -> None:
        """What no single field shows. RequestError 400."""
        for field, ids in (("stop_token_ids", self.stop_token_ids), ("allowed_token_ids", self.allowed_token_ids)):
            for i, token_id in enumerate(ids or ()):
                if token_id >= vocab_size:
                    raise bad_value(f"{field}.{i}", f"must be less than {vocab_size}, the size of the vocabulary")
        for name in self.logit_bias or ():
            if not (name.isascii() and name.isdigit() and int(name) < vocab_size):
                raise bad_value("logit_bias", f"'{name[:64]}' is no token id less than {vocab_size}")
        if self.token_limit is not None and (self.min_tokens or 0) > self.token_limit:
            raise bad_value("min_tokens", "must not be greater than the most tokens that are asked for")
        if self.stream_options is not None and not self.stream:
            raise bad_value("stream_options", "is for requests with `stream: true` only")


class ChatRequest(GenerationRequest):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: TokenCount | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, bool] | None = None
    enable_thinking: bool | None = None  # belongs into chat_template_kwargs, where many clients do not put it
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    mm_processor_kwargs: ProcessorKwargs | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

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

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def template_kwargs(self) -> dict[str, bool]:
        top_level = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return top_level | (self.chat_template_kwargs or {})

    @property
    def called(self) -> str | None:
        """The function that must be called, if one is named."""
        return self.tool_choice["function"]["name"] if isinstance(self.tool_choice, dict) else None

    @property
    def uses_tools(self) -> bool:
        """Whether the model sees the tools, and its calls are taken out of the text."""
        return bool(self.tools) and self.tool_choice != "none"

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        check_images(self.messages)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise bad_value("continue_final_message", "excludes `add_generation_prompt: true`")
            if self.messages[-1].role != "assistant" or not self.messages[-1].content:
                raise bad_value("continue_final_message", "needs a last message of the assistant with content")
        if self.top_logprobs and not self.logprobs:
            raise bad_value("top_logprobs", "is for requests with `logprobs: true` only")
        self._check_tools()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise bad_value("tools", "must have names of their own")
        check_tool_choice(self.tool_choice, names)


class CompletionRequest(GenerationRequest):
    """The body of `POST /v1/completions`."""

    prompt: Any
    max_tokens: Annotated[int, Field(ge=0, lt=1 << 63)] | None = None  # 0: nothing but the echo
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int:
        return DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> list[str | list[int]]:
        """One entry a prompt. RequestError 400."""
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(entry) is int for entry in prompt)):
            return [prompt]
        is_batch = isinstance(prompt, list) and prompt and all(isinstance(entry, str) or _is_token_list(entry) for entry in prompt)
        if not is_batch:
            raise bad_value("prompt", "must be text, a list of token ids, or a list of either that is not empty")
        if len(prompt) > MAX_PROMPTS:
            raise bad_value("prompt", f"must have at most {MAX_PROMPTS} entries")
        return list(prompt)

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        if self.max_tokens == 0 and not self.echo:
            raise bad_value("max_tokens", "must be at least 1 for requests without `echo: true`")
        for prompt in self.prompts:
            if not prompt:
                raise bad_value("prompt", "must not be empty")
            if isinstance(prompt, list) and not all(0 <= token_id < vocab_size for token_id in prompt):
                raise bad_value("prompt", f"holds token ids outside of the vocabulary of {vocab_size}")


class TokenizeRequest(GenerationRequest):
    """The body of `POST /tokenize` without messages."""

    prompt: Annotated[str, Field(min_length=1)]


class DetokenizeRequest(GenerationRequest):
    """The body of `POST /detokenize`."""

    tokens: Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]

    def check_together(self, vocab_size: int) -> None:
        super().check_together(vocab_size)
        if max(self.tokens) >= vocab_size:
            raise bad_value("tokens", f"holds ids outside of the vocabulary of {vocab_size}")


def check_tool_choice(choice: object, names: list[str]) -> None:
    """RequestError 400 unless it is a choice that OpenAI has and that fits the tools."""
    if choice is None or choice in ("none", "auto"):
        return
    named = choice.get("function", {}).get("name") if isinstance(choice, dict) and isinstance(choice.get("function"), dict) else None
    if choice != "required" and not isinstance(named, str):
        raise bad_value("tool_choice", "must be 'none', 'auto', 'required' or {\"type\": \"function\", \"function\": {\"name\": ...}}")
    if not names:
        raise bad_value("tool_choice", "needs tools")
    if named is not None and named not in names:
        raise bad_value("tool_choice", "names a function that is not among the tools")


def check_images(messages: list[Message]) -> None:
    """What no type says of image parts. RequestError 400."""
    for i, message in enumerate(messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if isinstance(part, ImagePart):
                _check_image(part, f"messages.{i}.content.{j}")


def _check_image(part: ImagePart, path: str) -> None:
    if part.image_url.url is None and part.uuid is None:
        raise bad_value(f"{path}.image_url", "may be null beside a `uuid` only")
    for extra, prefix in ((part.image_url.model_extra, f"{path}.image_url"), (part.model_extra, path)):
        for name, value in (extra or {}).items():
            if name in LIMITED_IN_IMAGES:
                check_limited(name, value, LIMITED_IN_IMAGES[name], f"{prefix}.{name}")


def _is_token_list(entry: object) -> bool:
    return isinstance(entry, list) and all(type(token_id) is int for token_id in entry)


def json_of(tools: list[Tool]) -> bytes:
    """Tools as templates see them: without what was not said."""
    return json.dumps([tool.model_dump(exclude_none=True) for tool in tools], ensure_ascii=False).encode()
