"""Log-probabilities of a prompt's tokens in documents."""

from collections.abc import Sequence

from engine.wire.reports import RankedToken, ShownReport, ranked_tokens


def scores_json(reports: Sequence[ShownReport]) -> dict[str, object]:
    """Return vLLM's member: for each token of the prompt an object by ids, null for the first."""
    entries = [{str(token.id): _token_json(token) for token in entry} or None for entry in ranked_tokens(reports)]
    return {"prompt_logprobs": entries or None}


def _token_json(token: RankedToken) -> dict[str, object]:
    return {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text.decode("utf-8", "replace")}
