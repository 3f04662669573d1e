"""Shared code of drafters: the choice of rows that get drafts, and the trust in a request's drafts.

A row is verified in one step with its drafts, so its next step can be planned only when the result is known: other rows are planned ahead
meanwhile. A row is held back only if its drafts should gain more than the wait costs. There are no drafts while a prompt waits or is
computed, nor with many rows, where each verified token takes time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.scheduler.request import Request
from engine.scheduler.state import State
from engine.wire.messages import MAX_PROPOSED

LEAST_PROBABILITY = 0.2  # least probability that a draft and all before it are accepted
LEAST_GAIN = 0.4  # expected tokens that outweigh the cost of waiting for the previous result
LEAST_GAIN_ALTERNATING = 1.1  # the same if other rows are planned ahead: the row then skips every other step
DECAY = 0.9  # factor of old hits and misses for each new one

Proposal = list[tuple[int, float]]  # tokens, each with its conditional probability


@dataclass(slots=True)
class Offer:
    request: Request
    drafts: list[int] = field(default_factory=list)
    gain: float = 0.0


@dataclass(slots=True)
class Trust:
    """Acceptance rate of one request's draft tokens. All draft tokens are compared with the output, verified or not."""

    hits: float = 1.4
    expected: float = 2.0  # the prior is slightly pessimistic
    proposal: Proposal = field(default_factory=list)
    num_known: int = 0  # tokens before the draft

    @property
    def share(self) -> float:
        return min(1.0, self.hits / self.expected)

    def score(self, request: Request) -> None:
        came = request.known_ids()[self.num_known :].tolist() if self.proposal else []
        for token, (proposed, probability) in zip(came, self.proposal, strict=False):
            self.hits = DECAY * self.hits + (token == proposed)
            self.expected = DECAY * self.expected + probability
            if token != proposed:
                break
        self.num_known = request.num_known


def give_drafts(state: State, verify_rows: int, make_offer: Callable[[Request, int], Offer]) -> None:
    """Implement `Proposer.offer`. `verify_rows`: rows of a step that cost little more than one. `make_offer` gets the most drafts of a row,
    0 if prompts come first."""
    rows = [request for request in state.running if request.num_output < request.max_tokens]
    most = min(MAX_PROPOSED, verify_rows // max(1, len(rows)) - 1)
    is_quiet = not state.waiting and all(request.is_decoding for request in rows)
    offers = []
    for request in rows:
        if request.proposed and request.num_sampled:
            continue  # its drafts are in flight
        request.proposed, request.is_held = (), False
        offers.append(make_offer(request, most if is_quiet else 0) if most > 0 else Offer(request))
    good = [offer for offer in offers if offer.gain >= LEAST_GAIN]
    if len(good) < len(offers):
        good = [offer for offer in good if offer.gain >= LEAST_GAIN_ALTERNATING]
    for offer in good:
        if offer.request.num_sampled:
            offer.request.is_held = True
        else:
            offer.request.proposed = tuple(offer.drafts)
