"""Outputs of an LLM, by vLLM's names."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pybase64

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

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def add(self, choice: Json) -> None:
        """Add a choice of a document, or the next part of one."""
        message = choice.get("delta") or choice.get("message") or choice
        self.text += message.get("content") or message.get("text") or ""
        self.reasoning += message.get("reasoning") or ""
        for position, call in enumerate(message.get("tool_calls") or ()):
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
    """The `n` answers to prompt `number` of a list. A request that failed has an `error` and no answers."""

    prompt: Any
    number: int
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_token_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[Json | None] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    error: Exception | None = None

    @property
    def finished(self) -> bool:
        return all(output.finish_reason for output in self.outputs)

    def add(self, choice: Json, document: Json) -> None:
        self.outputs[choice["index"]].add(choice)
        head = document | choice
        self.prompt_token_ids = head.get("prompt_token_ids") or self.prompt_token_ids
        self.prompt_logprobs = head.get("prompt_logprobs") or self.prompt_logprobs
        if usage := document.get("usage"):
            self.num_prompt_tokens, self.num_cached_tokens = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


@dataclass(slots=True)
class EmbeddingOutput:
    embedding: list[float] = field(default_factory=list)  # a unit vector


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """Embedding of prompt `number` of a list. A failed request has an `error` and an empty embedding."""

    prompt: Any
    number: int
    outputs: EmbeddingOutput = field(default_factory=EmbeddingOutput)
    num_prompt_tokens: int = 0
    error: Exception | None = None
    finished: bool = True

    def add(self, entry: Json, document: Json) -> None:
        self.outputs.embedding = np.frombuffer(pybase64.b64decode(entry["embedding"]), np.float32).tolist()
        self.num_prompt_tokens = document["usage"]["prompt_tokens"]
