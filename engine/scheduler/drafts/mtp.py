"""Drafts of the model's own head, `--draft mtp`. The worker computes them after each step and returns them with its result."""

from engine.launch.drafts import MAX_HEAD_DRAFTS
from engine.scheduler.drafts.drafter import LEAST_PROBABILITY, Offer, Trust, give_drafts
from engine.scheduler.proposer import Proposer
from engine.scheduler.request import Request
from engine.scheduler.state import State


class HeadDrafter(Proposer):
    """Drafter that holds rows back for the drafts of their results. A draft is accepted with probability `trust` if those before it are."""

    def __init__(self, verify_rows: int):
        self._verify_rows = verify_rows
        self._trust: dict[Request, Trust] = {}

    @property
    def num_sources(self) -> int:
        return len(self._trust)

    def offer(self, state: State) -> None:
        """Also set the number of drafts of the next step: as many as some row should often accept, but at least one, to notice an
        improvement."""
        give_drafts(state, self._verify_rows, self._offer)
        num_rows = min(len(state.running) + len(state.waiting), state.limits.max_num_seqs)
        most = min(MAX_HEAD_DRAFTS, self._verify_rows // max(1, num_rows) - 1)
        worth = (sum(trust.share**count >= LEAST_PROBABILITY for count in range(1, MAX_HEAD_DRAFTS + 1)) for trust in self._trust.values())
        state.num_proposed = max(0, min(most, max(1, max(worth, default=MAX_HEAD_DRAFTS))))

    def take(self, request: Request, proposed: list[int]) -> None:
        if proposed or request in self._trust:
            trust = self._trust.setdefault(request, Trust())
            trust.score(request)
            trust.proposal = [(token, 1.0) for token in proposed]

    def note(self, request: Request, num_accepted: int) -> None:
        self._trust[request].note(request, num_accepted)

    def release(self, request: Request) -> None:
        self._trust.pop(request, None)

    def _offer(self, request: Request, most: int) -> Offer:
        """Return the head's drafts. Tokens in flight need not match earlier drafts: their results bring new ones."""
        offer, trust = Offer(request), self._trust.setdefault(request, Trust())
        if most == 0:
            return offer
        drafts = [token for token, _ in trust.proposal[:MAX_HEAD_DRAFTS]]
        most = 0 if trust.is_paused(request) else min(most, MAX_HEAD_DRAFTS, request.max_tokens - request.num_output - 1)
        for i in range(most if request.num_sampled else min(most, len(drafts))):
            if (probability := trust.share ** (i + 1)) < LEAST_PROBABILITY:
                break
            offer.drafts += drafts[i : i + 1]
            offer.gain += probability
        return offer
