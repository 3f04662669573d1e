"""Outputs of an LLM, by vLLM's names."""

from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(slots=True)
class CompletionOutput:
    """One answer. `text` excludes reasoning and tool calls; `tool_calls` and `logprobs` are JSON of the API."""

    index: int
    text: str = ""
    reasoning: str = ""
    tool_calls: list[Json] = field(default_factory=list)
    logprobs: Json | None = None
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, choice: Json) -> None:
        """Add a choice of a document, or of a part of a stream."""
        message = choice.get("delta") or choice.get("message") or choice
        self.text += message.get("content") or message.get("text") or ""
        self.reasoning += message.get("reasoning") or ""
        for call in message.get("tool_calls") or ():
            if call.pop("index", len(self.tool_calls)) == len(self.tool_calls):
                self.tool_calls.append(call)
            else:
                self.tool_calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        self.token_ids += choice.get("token_ids") or ()
        for name, entries in (choice.get("logprobs") or {}).items():
            self.logprobs = self.logprobs or {}
            self.logprobs[name] = (self.logprobs.get(name) or []) + (entries or [])
        self.finish_reason, self.stop_reason = choice.get("finish_reason"), choice.get("stop_reason")


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float]  # a unit vector


@dataclass(slots=True)
class RequestOutput:
    """The `n` answers to prompt `number` of a list, or its embedding. A failed request has an `error` and no outputs."""

    prompt: Any
    number: int
    outputs: Any  # list of CompletionOutput, or EmbeddingOutput
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Json | None] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return isinstance(self.outputs, EmbeddingOutput) or all(output.finish_reason for output in self.outputs)

    def add(self, choice: Json, document: Json) -> None:
        if "embedding" in choice:
            self.outputs = EmbeddingOutput(choice["embedding"])
        else:
            self.outputs[choice["index"]].add(choice)
        head = document | choice
        self.prompt_token_ids = head.get("prompt_token_ids") or self.prompt_token_ids
        self.prompt_logprobs = head.get("prompt_logprobs") or self.prompt_logprobs
        if usage := document.get("usage"):
            self.num_prompt_tokens = usage["prompt_tokens"]
            self.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
