"""Sampling parameters, by vLLM's names. Those left out follow the checkpoint's recommendation, as over HTTP."""

from dataclasses import dataclass, field
from typing import Any

StructuredOutputsParams = dict[str, Any]  # of one member; `json` may be a pydantic class


@dataclass(kw_only=True)
class SamplingParams:
    """Fields of a request. Without `max_tokens` a chat extends to the end of the context, and a text completion has 16 tokens. `extra`
    holds further fields of the API."""

    n: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    structured_outputs: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def as_fields(self, is_chat: bool) -> dict[str, Any]:
        """Return members of a request's body."""
        given = {name: value for name, value in vars(self).items() if value is not None and name != "extra"} | self.extra
        if is_chat and self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        return {"return_token_ids": True, **given}
