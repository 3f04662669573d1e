"""Log-probabilities of a prompt's tokens in documents."""

from collections.abc import Sequence

from engine.wire.messages import Logprob
from engine.wire.reports import ShownReport, token_scores


def scores_json(reports: Sequence[ShownReport]) -> dict[str, object]:
    """Return vLLM's member: for each token of the prompt an object by ids, null for the first."""
    return {"prompt_logprobs": [_entry_json(entry) for entry in token_scores(reports)] or None}


def _entry_json(entry: Logprob) -> dict[str, object] | None:
    """Return the token itself and its alternatives. Only these have a rank."""
    if entry.logprob is None:
        return None
    tokens = [(None, (entry.id, entry.token, entry.logprob)), *enumerate(entry.top, 1)]
    return {
        str(token_id): {"logprob": value, "rank": rank, "decoded_token": text.decode("utf-8", "replace")}
        for rank, (token_id, text, value) in tokens
    }
