"""How an answer is drawn, by vLLM's names. What is left out is as over HTTP: the checkpoint's recommendation."""

from dataclasses import dataclass, field, fields
from typing import Any, Protocol


class HasSchema(Protocol):
    """A class of pydantic's."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]: ...


@dataclass(kw_only=True)
class StructuredOutputsParams:
    """What an answer must follow: one of these. A class of pydantic's may stand for its JSON schema."""

    json: dict[str, Any] | str | type[HasSchema] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None

    def as_field(self) -> dict[str, Any]:
        told = _told(self)
        if isinstance(self.json, type):
            told["json"] = self.json.model_json_schema()
        return told


@dataclass(kw_only=True)
class SamplingParams:
    """Fields of a request. Chats are as long as the context allows unless `max_tokens` is set; text completions have 16 tokens, as over
    HTTP. `extra` are further fields of the API."""

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
        """Of the JSON body."""
        told = _told(self)
        told |= told.pop("extra")
        if isinstance(self.structured_outputs, StructuredOutputsParams):
            told["structured_outputs"] = self.structured_outputs.as_field()
        if self.logit_bias is not None:
            told["logit_bias"] = {str(token_id): bias for token_id, bias in self.logit_bias.items()}
        if is_chat and self.logprobs is not None:
            told |= {"logprobs": True, "top_logprobs": self.logprobs}
        return told


def _told(params: SamplingParams | StructuredOutputsParams) -> dict[str, Any]:
    values = ((one.name, getattr(params, one.name)) for one in fields(params))
    return {name: value for name, value in values if value is not None}
