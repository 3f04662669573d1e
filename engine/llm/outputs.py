"""What an LLM answers, by vLLM's names."""

from dataclasses import dataclass, field
from typing import Any

from engine.wire.params import Logprob, RankedToken


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer as far as it has come. `text` is without thoughts and calls."""

    index: int
    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    logprobs: list[Logprob] | None
    token_ids: list[int]
    num_tokens: int
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """`outputs` are the `n` answers to one prompt; with an `error` (`errors="return"` leaves it here) there are none."""

    request_id: str
    prompt: Any  # as it was given
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[list[RankedToken]] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    finished: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]  # its length is 1


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """`error` as of a RequestOutput; the embedding is then empty."""

    request_id: str
    outputs: EmbeddingOutput
    num_prompt_tokens: int = 0
    error: Exception | None = None
