"""Outputs of an LLM, by vLLM's names."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` excludes reasoning and tool calls; `tool_calls` and `logprobs` are JSON of the API."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: dict[str, Any] | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def add(self, choice: dict[str, Any]) -> None:
        """Add a choice of a document, or the next part of one."""
        said = choice.get("delta") or choice.get("message") or choice
        self.text += said.get("content") or said.get("text") or ""
        self.reasoning += said.get("reasoning") or ""
        for position, call in enumerate(said.get("tool_calls") or ()):
            if (index := call.pop("index", position)) == len(self.tool_calls):
                self.tool_calls.append(call)
            else:
                self.tool_calls[index]["function"]["arguments"] += call["function"]["arguments"]
        self.token_ids += choice.get("token_ids") or ()
        for name, entries in (choice.get("logprobs") or {}).items():
            self.logprobs = self.logprobs or {}
            self.logprobs[name] = (self.logprobs.get(name) or []) + (entries or [])
        self.finish_reason, self.stop_reason = choice.get("finish_reason"), choice.get("stop_reason")


@dataclass(slots=True)
class RequestOutput:
    """The `n` answers to one prompt. A request that failed has an `error` and no answers."""

    prompt: Any
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)

    def add(self, choice: dict[str, Any], document: dict[str, Any]) -> None:
        self.outputs[choice["index"] % len(self.outputs)].add(choice)
        head = document | choice
        self.prompt_token_ids = head.get("prompt_token_ids") or self.prompt_token_ids
        self.prompt_logprobs = head.get("prompt_logprobs")
        if usage := document.get("usage"):
            self.num_prompt_tokens, self.num_cached_tokens = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    embedding: list[float]  # a unit vector


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """Embedding result. A failed request has an `error` and an empty embedding."""

    outputs: EmbeddingOutput
    num_prompt_tokens: int = 0
    error: Exception | None = None
