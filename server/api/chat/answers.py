"""Types of answers of chat and text completions for `/openapi.json`, with the members that clients usually read; `format.py` makes them."""

from typing import Any, Literal

from pydantic import BaseModel

from server.api.schema.tools import CustomCall, ToolCall


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None = None
    total_tokens: int
    prompt_tokens_details: dict[str, int] | None = None
    completion_tokens_details: dict[str, int] | None = None


class Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str
    usage: Usage | None = None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning: str | None = None
    tool_calls: list[ToolCall | CustomCall] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: dict[str, Any] | None


class ChatCompletion(Answer):
    choices: list[ChatChoice]
    usage: Usage


class ChatChunkChoice(BaseModel):
    index: int
    delta: dict[str, Any]
    finish_reason: str | None = None


class ChatChunk(Answer):
    choices: list[ChatChunkChoice]


class TextChoice(BaseModel):
    index: int
    text: str
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class Completion(Answer):
    """Document, or data of an event of a stream that ends with `[DONE]`."""

    choices: list[TextChoice]


class Tokenized(BaseModel):
    count: int | list[int]
    max_model_len: int
    tokens: list[int] | list[list[int]]
    token_strs: None = None


class Detokenized(BaseModel):
    prompt: str | list[str]
    text: str | list[str]
