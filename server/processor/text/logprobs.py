"""Log-probabilities by the bytes of their tokens."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from engine.wire.messages import Logprob, RankedToken
from engine.wire.params import TokenLogprobs
from engine.wire.reports import PromptLogprobs

Spelling = Callable[[int], bytes]
Entry = tuple[int, float | None, list[tuple[int, float]]]  # prompt token: id, value, and the most likely alternatives


def id_spelling(token_id: int) -> bytes:
    """Return the spelling of an id, as in vLLM for ambiguous texts."""
    return b"token_id:%d" % token_id


def of_token(spelling: Spelling, token_id: int, entry: TokenLogprobs) -> Logprob:
    return named(spelling, (token_id, entry.logprob, list(zip(entry.top_ids, entry.top_logprobs, strict=True))))


def named(spelling: Spelling, entry: Entry) -> Logprob:
    token_id, value, top = entry
    return Logprob(spelling(token_id), value, [(spelling(top_id), top_value) for top_id, top_value in top])


def ranked(spelling: Spelling, entry: Entry) -> list[RankedToken]:
    """The token first; empty for the first one of a prompt."""
    token_id, value, top = entry
    if value is None:
        return []
    likely = [RankedToken(top_id, spelling(top_id), top_value, rank) for rank, (top_id, top_value) in enumerate(top, 1)]
    known = [token for token in likely if token.id == token_id]
    return [*(known or [RankedToken(token_id, spelling(token_id), value, None)]), *(token for token in likely if token.id != token_id)]


def of_prompt(ids: Sequence[int], found: PromptLogprobs | None) -> Iterator[Entry]:
    """`found` is None for a prompt of one token."""
    yield ids[0], None, []
    if found is None:
        return
    assert found.start == 1
    values = np.frombuffer(found.logprobs, np.float32)
    top_ids = np.frombuffer(found.top_ids, np.int32).reshape(len(values), found.num_top)
    top_values = np.frombuffer(found.top_logprobs, np.float32).reshape(len(values), found.num_top)
    for token_id, value, some_ids, some_values in zip(ids[1:], values, top_ids, top_values, strict=True):
        yield token_id, float(value), list(zip(some_ids.tolist(), some_values.tolist(), strict=True))
