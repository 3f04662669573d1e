"""Log-probabilities of a prompt's tokens in documents."""

import msgspec

from engine.wire.messages import Logprob
from server.api.http.streaming import Scores, encode


def scores_json(scores: Scores) -> dict[str, object]:
    """Return vLLM's member: for each token of the prompt an object by ids, null for the first. Each is serialised at once: its objects
    would take far more memory."""
    return {"prompt_logprobs": [msgspec.Raw(encode(_entry_json(entry))) for entry in scores] or None}


def _entry_json(entry: Logprob) -> dict[str, object] | None:
    """Return the token itself and its alternatives. Only these have a rank."""
    if entry.logprob is None:
        return None
    tokens = [(None, (entry.id, entry.token, entry.logprob)), *enumerate(entry.top, 1)]
    return {
        str(token_id): {"logprob": value, "rank": rank, "decoded_token": text.decode("utf-8", "replace")}
        for rank, (token_id, text, value) in tokens
    }
