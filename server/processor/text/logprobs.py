"""Log-probabilities by the bytes of their tokens."""

from collections.abc import Callable

from engine.wire.messages import Logprob
from engine.wire.params import TokenLogprobs
from server.processor.text.detokenize import TokenTable

Spelling = Callable[[int], bytes]
Entry = tuple[int, float | None, list[tuple[int, float]]]  # token: id, value, and the most likely alternatives


def id_spelling(token_id: int) -> bytes:
    """Return the spelling of an id, as in vLLM for ambiguous texts."""
    return b"token_id:%d" % token_id


def spelling_of(table: TokenTable, names: str) -> Spelling:
    both: Spelling = lambda token_id: b"%d:%b" % (token_id, table.spelling(token_id))  # noqa: E731
    return {"texts": table.spelling, "ids": id_spelling, "both": both}[names]


def of_token(spelling: Spelling, token_id: int, entry: TokenLogprobs) -> Logprob:
    return named(spelling, (token_id, entry.logprob, list(zip(entry.top_ids, entry.top_logprobs, strict=True))))


def named(spelling: Spelling, entry: Entry) -> Logprob:
    token_id, value, top = entry
    return Logprob(spelling(token_id), value, [(spelling(top_id), top_value) for top_id, top_value in top])
