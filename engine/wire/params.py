"""Options of sampling and of reported tokens. Part of the messages."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgspec

MAX_LOGIT_EDITS = 1024  # `logit_bias`, bad words of one token and, with `min_tokens`, end tokens
MAX_BIASED, MAX_STOP_IDS = 500, 256  # with the bad words they stay below MAX_LOGIT_EDITS
MAX_BAD_WORDS = 128  # words of several tokens
MAX_BAD_WORD_TOKENS = 16
MAX_TOP_LOGPROBS = 20
MAX_ALLOWED_TOKENS = 1024


class Limits:
    """Annotation of a value that clients send. `slot`: its kernel argument. `json`: its type in requests, if different. `is_text`: the
    processor converts it to ids."""

    def __init__(self, slot: str = "", json: Any = None, is_text: bool = False, **bounds: float):
        self.slot, self.json, self.is_text, self.bounds = slot, json, is_text, bounds

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {**handler(source), **self.bounds}


TokenCount = Annotated[int, Limits(ge=1, lt=1 << 63)]
TokenId = Annotated[int, Limits(ge=0, lt=1 << 31)]
NotEmpty = Annotated[str, Limits(min_length=1)]
Bias = Annotated[float, Limits(ge=-100, le=100)]
Temperature = Annotated[float, Limits("inverse_temperature", ge=0, le=100)]
TopP = Annotated[float, Limits("top_p", gt=0, le=1)]
TopK = Annotated[int, Limits("top_k", ge=-1, lt=1 << 31)]
NumLogprobs = Annotated[int, Limits(ge=0, le=MAX_TOP_LOGPROBS)]
AdditivePenalty = Annotated[float, Limits("penalties", ge=-2, le=2)]


class OutputOptions(msgspec.Struct, frozen=True):
    """Options of the output text. `calls`: number of tool calls extracted from the text."""

    stop: list[str] = []
    min_tokens: int = 0  # tokens before stop strings apply
    include_stop: bool = False  # whether the text includes the stop string
    skip_special_tokens: bool = True
    calls: Literal["none", "one", "all"] = "none"
    must_call: bool = False  # the answer consists of calls only
    called: str | None = None  # the only function that may be called
    echo: bool = False  # text and log-probabilities begin with the prompt's
    bad_words: list[str] = []  # as given, and after a space
    token_ids: bool = False  # in addition to the text; the prompt's with the first token
    prompt_logprobs: bool = False  # separate from the answer, not its beginning


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """The table of sampling parameters: name, type, limits, kernel slot, and the value that turns it off. Fields of requests, their limits,
    the worker's tables and docs/fields.md derive from it.

    `temperature` 0 is greedy. `max_tokens` None means up to the context. Penalties are as vLLM's: presence and frequency look at the
    output, repetition at the prompt too. Before `min_tokens` neither an end token nor one of `stop_token_ids` is sampled. `bad_words` are
    never completed within the output. With `pooled_ids` the answer is the logits of these tokens after the prompt or, if there are none,
    its last hidden state. If there are `allowed_token_ids`, no others are sampled. `logprobs` asks for the log-probability of each token
    sampled, and of so many most likely ones, by the raw logits; `prompt_logprobs` for those of the prompt, which is then not taken from the
    prefix cache.
    """

    max_tokens: TokenCount | None = None
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: Annotated[float, Limits("log_min_p", ge=0, le=1)] = 0.0
    seed: Annotated[int, Limits(ge=-(1 << 63), lt=1 << 63)] = 0
    ignore_eos: Annotated[bool, Limits()] = False
    stop_token_ids: Annotated[tuple[int, ...], Limits(json=list[TokenId], max_length=MAX_STOP_IDS)] = ()
    repetition_penalty: Annotated[float, Limits("penalties", gt=0, le=100)] = 1.0
    frequency_penalty: AdditivePenalty = 0.0
    presence_penalty: AdditivePenalty = 0.0
    logit_bias: Annotated[tuple[tuple[int, float], ...], Limits(json=dict[str, Bias], max_length=MAX_BIASED)] = ()  # (token id, addend)
    min_tokens: Annotated[int, Limits(ge=0, lt=1 << 31)] = 0
    bad_words: Annotated[tuple[tuple[int, ...], ...], Limits(json=list[NotEmpty], is_text=True, max_length=MAX_BAD_WORDS // 2)] = ()
    allowed_token_ids: Annotated[tuple[int, ...], Limits(json=list[TokenId], min_length=1, max_length=MAX_ALLOWED_TOKENS)] = ()
    prompt_logprobs: Annotated[int, Limits(ge=-1, le=MAX_TOP_LOGPROBS)] | None = None  # in requests -1 means the maximum
    logprobs: int | None = None  # each dialect has its own fields for it, of type `NumLogprobs`
    thinking_token_budget: Annotated[int, Limits(ge=0, lt=1 << 63)] | None = None  # then the token that ends the reasoning is forced
    think_ids: tuple[int, ...] = ()  # of a budget: the token that ends the reasoning, after that which begins it unless the prompt does
    pooled_ids: tuple[int, ...] | None = None

    @property
    def uses_prefixes(self) -> bool:
        """Return False if log-probabilities of the whole prompt are requested."""
        return self.prompt_logprobs is None

    def of_answer(self, index: int) -> "SamplingParams":
        """Return the parameters of answer `index`; only the first one reports the prompt."""
        return msgspec.structs.replace(self, seed=self.seed + index, prompt_logprobs=None) if index else self


class Parameter(NamedTuple):
    name: str
    json: Any
    default: Any
    slot: str
    is_text: bool
    bounds: dict[str, float]


def _parameters() -> Iterator[Parameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    for field in msgspec.structs.fields(SamplingParams):
        hint = hints[field.name]
        for limits in [one for part in (hint, *get_args(hint)) for one in get_args(part)[1:] if isinstance(one, Limits)]:
            json = hint if limits.json is None else Annotated[limits.json, limits]
            yield Parameter(field.name, json, field.default, limits.slot, limits.is_text, limits.bounds)


PARAMETERS = {parameter.name: parameter for parameter in _parameters()}
PENALISING = [name for name, parameter in PARAMETERS.items() if parameter.slot == "penalties"]  # in the order of the kernels


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probabilities of one token and of the most likely alternatives, the most likely first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Log-probability of a token, by id and bytes, and of the most likely alternatives, the most likely first. The first token of a prompt
    has none."""

    id: int
    token: bytes
    logprob: float | None
    top: list[tuple[int, bytes, float]]


class ChatPrompt(msgspec.Struct, tag=True, frozen=True):
    """Input of the chat template. `messages` and `tools` are JSON; an image part in it is `{"type": "image", "media": index}`."""

    messages: bytes
    tools: bytes | None = None
    template_kwargs: dict[str, Any] = {}
    ending: Literal["generation", "none", "continue"] = "generation"  # "continue": the last message stays open


TextPrompt = str  # tokenised unchanged, including special tokens
TokenPrompt = list[int]  # ids within the vocabulary
Prompt = ChatPrompt | TextPrompt | TokenPrompt
