"""How a request wants its tokens drawn and reported. Part of the messages."""

from collections.abc import Sequence
from typing import Literal

import msgspec

MAX_LOGIT_EDITS = 1024  # `logit_bias`, bad words of one token and, with `min_tokens`, ends
MAX_BAD_WORDS = 128  # of several tokens
MAX_BAD_WORD_TOKENS = 16
MAX_TOP_LOGPROBS = 20
MAX_ALLOWED_TOKENS = 1024


class OutputOptions(msgspec.Struct, frozen=True):
    """What becomes of the tokens. `calls`: how many tool calls are taken out of the text."""

    stop: list[str] = []
    min_tokens: int = 0  # before a stop string counts
    include_stop: bool = False  # in the text
    skip_special_tokens: bool = True
    calls: Literal["none", "one", "all"] = "none"
    must_call: bool = False  # nothing but calls
    called: str | None = None  # of this function only
    echo: bool = False  # text and log-probabilities begin with the prompt's
    bad_words: list[str] = []  # as they are and behind a space
    token_ids: bool = False  # beside the text, the prompt's with the first token
    names_ids: bool = False  # log-probabilities are told by `token_id:5` instead of by text
    prompt_logprobs: bool = False  # beside the answer, not as its beginning


class Grammar(msgspec.Struct, frozen=True):
    """What an answer must follow. `text` of a "choice" is a JSON list of strings."""

    kind: Literal["json_object", "json_schema", "regex", "ebnf", "choice", "structural_tag"]
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are drawn. `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. `max_tokens` None means up to the context.

    Penalties are as vLLM's: presence and frequency look at the output, repetition at the prompt too; it is greater than 0, and 1 is off.
    Before `min_tokens` neither an end token nor one of `stop_token_ids` is drawn. `bad_words` are never completed within the output.
    With `pooled_ids` the answer is the logits of these tokens behind the prompt or, if there are none, its last hidden state.
    If there are `allowed_token_ids`, no others are drawn. `logprobs` asks for the log-probability of each token drawn, and of so many most
    likely ones, by the raw logits; `prompt_logprobs` for those of the prompt, which is then not taken from the prefix cache.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, what is added to its logit)
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooled_ids: tuple[int, ...] | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Of N tokens of a prompt from `start` on (the first token has none), as arrays in row-major order."""

    start: int
    num_top: int
    logprobs: bytes  # float32 (N,)
    top_ids: bytes  # int32 (N, num_top), the most likely first
    top_logprobs: bytes  # float32 (N, num_top)

    @property
    def end(self) -> int:
        return self.start + len(self.logprobs) // 4

    def beginning_at(self, start: int) -> "PromptLogprobs":
        """The same without the tokens before `start`."""
        skipped = 4 * (start - self.start)
        num_top = self.num_top
        tops = self.top_ids[skipped * num_top :], self.top_logprobs[skipped * num_top :]
        return PromptLogprobs(start, num_top, self.logprobs[skipped:], *tops)

    @staticmethod
    def joined(parts: Sequence["PromptLogprobs"]) -> "PromptLogprobs | None":
        """One of consecutive parts; None if there are none."""
        if not parts:
            return None
        first = parts[0]
        return PromptLogprobs(
            first.start,
            first.num_top,
            b"".join(part.logprobs for part in parts),
            b"".join(part.top_ids for part in parts),
            b"".join(part.top_logprobs for part in parts),
        )


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Of one token, and of the most likely ones in its place, the most likely first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Logprob(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The same with bytes of tokens. The first token of a prompt has no log-probability."""

    token: bytes
    logprob: float | None
    top: list[tuple[bytes, float]]


class RankedToken(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """`rank` counts from 1 and is known of the most likely ones."""

    id: int
    text: bytes
    logprob: float
    rank: int | None


class ChatPrompt(msgspec.Struct, tag=True, frozen=True):
    """What the chat template renders. `messages` and `tools` are JSON; an image part in it is `{"type": "image", "media": index}`."""

    messages: bytes
    tools: bytes | None = None
    template_kwargs: dict[str, bool] = {}
    ending: Literal["generation", "none", "continue"] = "generation"  # "continue": the last message stays open


class TextPrompt(msgspec.Struct, tag=True, frozen=True):
    """Text that becomes tokens as it is, special tokens included."""

    text: str


class TokenPrompt(msgspec.Struct, tag=True, frozen=True):
    """Token ids, within the vocabulary."""

    ids: list[int]
