"""Log-probabilities of a prompt's tokens in documents."""

from collections.abc import Sequence

from engine.wire.reports import RankedToken, ShownReport, ranked_places


def scores_json(reports: Sequence[ShownReport]) -> dict[str, object]:
    """Return vLLM's member: for each token of the prompt an object by ids, null for the first."""
    places = [{str(token.id): _token_json(token) for token in place} or None for place in ranked_places(reports)]
    return {"prompt_logprobs": places or None}


def _token_json(token: RankedToken) -> dict[str, object]:
    return {"logprob": token.logprob, "rank": token.rank, "decoded_token": token.text.decode("utf-8", "replace")}
