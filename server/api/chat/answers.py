"""What answers of chat and text completions hold, for `/openapi.json`; `format.py` makes them."""

from typing import Any, Literal

from pydantic import BaseModel

from server.api.chat.schema import ToolCall


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None = None
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class Token(BaseModel):
    token: str
    logprob: float | None
    bytes: list[int]
    top_logprobs: list["Token"] | None = None


class TokenList(BaseModel):
    content: list[Token]
    refusal: None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: TokenList | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: dict[str, float] | None = None


class ChatDelta(BaseModel):
    """A piece of a message: a call's id and name come once, pieces of its arguments follow."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: TokenList | None = None
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None


class ChatChunk(BaseModel):
    """One event's data; the last event is `[DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None


class TextLogprobs(BaseModel):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: int | str | None = None


class Completion(BaseModel):
    """A document, or one event's data of a stream whose last event is `[DONE]`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    timings: dict[str, float] | None = None


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: None = None


class Detokenized(BaseModel):
    prompt: str
