"""Numbers that a request reports in addition to its tokens. Part of the messages.

A worker reports them by chunk, the scheduler joins the parts of a request, and the first output of an answer carries them. Clients get the
converted numbers with the events of the answer."""

from collections.abc import Sequence

import msgspec

from engine.wire.params import Logprob

FIRST = 1  # the first token of a prompt with a log-probability


class Numbers(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Float32 values instead of text."""

    values: bytes

    def add_to(self, parts: "list[Report]") -> None:
        parts[:] = [self]


class PromptLogprobs(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Log-probabilities of N tokens of a prompt from `start` on (the first token has none), as arrays in row-major order."""

    start: int
    num_top: int
    logprobs: bytes  # float32 (N,)
    top_ids: bytes  # int32 (N, num_top), the most likely first
    top_logprobs: bytes  # float32 (N, num_top)

    def add_to(self, parts: "list[Report]") -> None:
        """Append the part. After a preemption the prompt is computed again from its beginning, with weights that may be new: the parts
        before are dropped."""
        if self.start == FIRST:
            parts.clear()
        parts.append(self)


class TokenScores(msgspec.Struct, tag=True, frozen=True, array_like=True):
    entries: list[Logprob]


Report = PromptLogprobs | Numbers
ShownReport = TokenScores | Numbers  # form for clients


def joined(parts: Sequence[Report]) -> Report | None:
    """Join the parts of a request; None if there are none."""
    scores = [part for part in parts if isinstance(part, PromptLogprobs)]
    if not scores:
        return parts[0] if parts else None
    arrays = (b"".join(part) for part in zip(*((part.logprobs, part.top_ids, part.top_logprobs) for part in scores), strict=True))
    return PromptLogprobs(scores[0].start, scores[0].num_top, *arrays)
