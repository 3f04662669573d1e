"""Log-probabilities by the bytes of their tokens."""

from collections.abc import Callable, Iterable

from engine.wire.messages import Logprob
from server.processor.text.detokenize import TokenTable

Spelling = Callable[[int], bytes]


def spelling_of(table: TokenTable, names_ids: bool) -> Spelling:
    """Return the names of tokens: their bytes, or their ids, as in vLLM for ambiguous texts."""
    return (lambda token_id: b"token_id:%d" % token_id) if names_ids else table.spelling


def named(spelling: Spelling, token_id: int, value: float | None, top: Iterable[tuple[int, float]]) -> Logprob:
    return Logprob(token_id, spelling(token_id), value, [(top_id, spelling(top_id), top_value) for top_id, top_value in top])
