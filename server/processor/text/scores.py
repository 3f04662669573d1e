"""Log-probabilities of a prompt's tokens, sent before the first token of an answer."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from engine.wire.messages import Submit
from engine.wire.reports import PromptLogprobs, Report, TokenScores
from server.processor.text.detokenize import TokenTable
from server.processor.text.logprobs import named, spelling_of

SLICE = 256  # tokens per event: 6 ms with 20 alternatives each


class PromptScores:
    """Scores of one request's prompt, for all of its answers."""

    def __init__(self, submit: Submit, table: TokenTable):
        self._params, self._options, self._table = submit.params, submit.output, table
        self._found: PromptLogprobs | None = None

    def parts(self, prompt_ids: Sequence[int], report: Report | None) -> Iterator[dict[str, Any]]:
        """Yield members of events for an answer, whose first output has the report; that of the first answer precedes all others."""
        if isinstance(report, PromptLogprobs):
            self._found = report
        entries, spelling = of_prompt(prompt_ids, self._found), spelling_of(self._table, self._options.names_ids)
        num_top = self._params.logprobs if self._options.echo else None
        while part := list(islice(entries, SLICE)):
            shown: dict[str, Any] = {}
            if self._options.prompt_logprobs:
                shown["report"] = TokenScores([named(self._table.spelling, *entry) for entry in part])
            if num_top is not None:
                shown["logprobs"] = [named(spelling, token_id, value, top[:num_top]) for token_id, value, top in part]
            yield shown


def scores_of(submit: Submit, table: TokenTable) -> PromptScores | None:
    return None if submit.params.prompt_logprobs is None else PromptScores(submit, table)


def of_prompt(ids: Sequence[int], found: PromptLogprobs | None) -> Iterator[tuple[int, float | None, list[tuple[int, float]]]]:
    """Yield id and value of each token, and its most likely alternatives. `found` is None for a prompt of one token."""
    yield ids[0], None, []
    if found is None:
        return
    assert found.start == 1
    values = np.frombuffer(found.logprobs, np.float32)
    top_ids = np.frombuffer(found.top_ids, np.int32).reshape(len(values), found.num_top)
    top_values = np.frombuffer(found.top_logprobs, np.float32).reshape(len(values), found.num_top)
    for token_id, value, some_ids, some_values in zip(ids[1:], values, top_ids, top_values, strict=True):
        yield token_id, float(value), list(zip(some_ids.tolist(), some_values.tolist(), strict=True))
