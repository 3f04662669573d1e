"""What answers of chat and text completions hold, for `/openapi.json`; `format.py` makes them."""

from typing import Any, Literal

from pydantic import BaseModel

from server.openai.tools import CustomCall, ToolCall


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
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall | CustomCall] | None = None


class RankedToken(BaseModel):
    logprob: float
    rank: int | None
    decoded_token: str


class Head(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage | None = None
    timings: dict[str, float] | None = None
    warnings: list[str] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, RankedToken] | None] | None = None


class Ending(BaseModel):
    finish_reason: Literal["stop", "length", "tool_calls"] | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None


class ChatChoice(Ending):
    index: int
    message: AnswerMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: TokenList | None


class ChatCompletion(Head):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """A piece of a message: a call's id and name come once, pieces of its arguments follow."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChunkChoice(Ending):
    index: int
    delta: ChatDelta
    logprobs: TokenList | None = None


class ChatChunk(Head):
    """One event's data; the last event is `[DONE]`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


class TextLogprobs(BaseModel):
    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class TextChoice(Ending):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, RankedToken] | None] | None = None


class Completion(Head):
    """A document, or one event's data of a stream whose last event is `[DONE]`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class Tokenized(BaseModel):
    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: None = None


class Detokenized(BaseModel):
    prompt: str | list[str]
    text: str | list[str]
