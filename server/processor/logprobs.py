"""Log-probabilities by the bytes of their tokens."""

from collections.abc import Iterator, Sequence

import numpy as np

from engine.messages import Logprob
from engine.params import PromptLogprobs, TokenLogprobs
from server.processor.detokenize import TokenTable


def of_token(table: TokenTable, token_id: int, entry: TokenLogprobs) -> Logprob:
    top = [(table.spelling(top_id), value) for top_id, value in zip(entry.top_ids, entry.top_logprobs, strict=True)]
    return Logprob(table.spelling(token_id), entry.logprob, top)


def of_prompt(table: TokenTable, ids: Sequence[int], found: PromptLogprobs | None) -> Iterator[Logprob]:
    """`found` is None for a prompt of one token."""
    yield Logprob(table.spelling(ids[0]), None, [])
    if found is None:
        return
    assert found.start == 1
    values = np.frombuffer(found.logprobs, np.float32).tolist()
    top_ids = np.frombuffer(found.top_ids, np.int32).reshape(len(values), found.num_top).tolist()
    top_values = np.frombuffer(found.top_logprobs, np.float32).reshape(len(values), found.num_top).tolist()
    spelling = table.spelling
    for token_id, value, some_ids, some_values in zip(ids[1:], values, top_ids, top_values, strict=True):
        yield Logprob(spelling(token_id), value, list(zip(map(spelling, some_ids), some_values, strict=True)))
