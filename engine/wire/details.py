"""Counts that a usage reports about an answer's tokens: at present, about draft tokens. Part of the messages."""

from typing import Annotated

import msgspec

from engine.wire.metric import Total


class DetailTotals(msgspec.Struct):
    """Totals of `TokenDetails`, which are metrics of `EngineStats`."""

    drafts: Annotated[int, Total("rows verified with draft tokens", "spec_decode_num_drafts")] = 0
    draft_tokens: Annotated[int, Total("verified draft tokens", "spec_decode_num_draft_tokens")] = 0
    accepted_draft_tokens: Annotated[int, Total("accepted draft tokens", "spec_decode_num_accepted_tokens")] = 0
    accepted_by_position: Annotated[
        list[int], Total("draft tokens in answers, by position in their row", "spec_decode_num_accepted_tokens_per_pos")
    ] = []

    @property
    def tokens_per_verified_row(self) -> float | None:
        """Mean number of tokens that a row with draft tokens added to its answer; None if there was no such row."""
        return 1 + self.accepted_draft_tokens / self.drafts if self.drafts else None


class TokenDetails(msgspec.Struct, array_like=True):
    """Counts for some tokens of an answer."""

    num_drafts: int = 0  # draft tokens that were verified
    num_accepted: int = 0  # accepted ones, which are the first tokens of an output

    def add(self, other: "TokenDetails") -> None:
        self.num_drafts += other.num_drafts
        self.num_accepted += other.num_accepted

    def note(self, output: "TokenDetails", index: int) -> None:
        """Count token `index` of an output with these details."""
        self.num_drafts += output.num_drafts if index == 0 else 0
        self.num_accepted += index < output.num_accepted

    def count_in(self, stats: DetailTotals) -> None:
        stats.drafts += 1
        stats.draft_tokens += self.num_drafts
        stats.accepted_draft_tokens += self.num_accepted
        stats.accepted_by_position += [0] * (self.num_drafts - len(stats.accepted_by_position))
        for position in range(self.num_accepted):
            stats.accepted_by_position[position] += 1

    def as_json(self) -> dict[str, int]:
        """Return members of OpenAI's `completion_tokens_details`."""
        if not self.num_drafts:
            return {}
        return {"accepted_prediction_tokens": self.num_accepted, "rejected_prediction_tokens": self.num_drafts - self.num_accepted}
