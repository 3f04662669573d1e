"""Sampling parameters, by vLLM's names. Those left out follow the checkpoint's recommendation, as over HTTP."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """Constraint of an answer: one of these. `json` may be a pydantic class."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


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
    structured_outputs: StructuredOutputsParams | dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def as_fields(self, is_chat: bool) -> dict[str, Any]:
        """Members of a JSON body."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        given |= given.pop("extra")
        if rules := given.get("structured_outputs"):
            schema: Any = rules.get("json")
            shown = {"json": schema.model_json_schema()} if hasattr(schema, "model_json_schema") else {}
            given["structured_outputs"] = {name: rule for name, rule in (rules | shown).items() if rule is not None}
        if is_chat and self.logprobs is not None:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        return given
