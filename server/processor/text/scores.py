"""Log-probabilities by the bytes of their tokens, and those of a prompt, sent with the first event of each answer."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
import numpy as np

from engine.wire.messages import Event, Logprob, Submit
from engine.wire.reports import PromptLogprobs, Report, TokenScores
from server.processor.text.output_text import TokenTable

Spelling = Callable[[int], bytes]


def named(spelling: Spelling, token_id: int, value: float | None, top: Iterable[tuple[int, float]]) -> Logprob:
    return Logprob(token_id, spelling(token_id), value, [(top_id, spelling(top_id), top_value) for top_id, top_value in top])


class PromptScores:
    def __init__(self, submit: Submit, table: TokenTable):
        self._params, self._options, self._table = submit.params, submit.output, table
        self._found: PromptLogprobs | None = None

    def added_to(self, event: Event, prompt_ids: Sequence[int], report: Report | None) -> Event:
        """Return an answer's first event with the scores; only the first answer's output has the report."""
        if isinstance(report, PromptLogprobs):
            self._found = report
        entries = list(of_prompt(prompt_ids, self._found))
        if self._options.prompt_logprobs:
            event = msgspec.structs.replace(event, report=TokenScores([named(self._table.spelling, *entry) for entry in entries]))
        num_top = self._params.logprobs
        if self._options.echo and num_top is not None:
            scores = [named(self._table.spelling, token_id, value, top[:num_top]) for token_id, value, top in entries]
            event = msgspec.structs.replace(event, logprobs=scores + event.logprobs)
        return event


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
