"""Drafts of the model's own head, `--draft mtp`. Workers compute them after each step, while this process plans their verification. The
row's next result reports them."""

from engine.scheduler.core import Proposer
from engine.scheduler.drafts.drafter import LEAST_PROBABILITY, Offer, Trust, give_drafts
from engine.scheduler.request import Request
from engine.scheduler.state import State
from engine.wire.config import MAX_HEAD_DRAFTS
from engine.wire.messages import ON_DEVICE

RETRY_STEPS = 24  # steps without a draft before the next, which costs about half a step


class HeadDrafter(Proposer):
    """Holds rows back for their results, after which drafts follow; each is accepted with probability `trust` if those before it are."""

    def __init__(self, verify_rows: int):
        self._verify_rows = verify_rows
        self._trust: dict[Request, Trust] = {}
        self._without = 0  # steps since the last one for which drafts were worth it

    def offer(self, state: State) -> None:
        """Also set the number of drafts of the next step."""
        give_drafts(state, self._verify_rows, self._offer)
        num_rows = min(len(state.running) + len(state.waiting), state.limits.max_num_seqs)
        most = min(MAX_HEAD_DRAFTS, self._verify_rows // max(1, num_rows) - 1)
        worth = (sum(trust.share**count >= LEAST_PROBABILITY for count in range(1, MAX_HEAD_DRAFTS + 1)) for trust in self._trust.values())
        count = max(worth, default=MAX_HEAD_DRAFTS)
        self._without = 0 if count else self._without + 1
        state.num_proposed = max(0, min(most, count or int(self._without % RETRY_STEPS == 0)))

    def take(self, request: Request, proposed: list[int]) -> None:
        trust = self._trust.setdefault(request, Trust())
        trust.proposal = [(token, 1.0) for token in proposed]
        trust.score(request)

    def release(self, request: Request) -> None:
        self._trust.pop(request, None)

    def _offer(self, request: Request, most: int) -> Offer:
        offer, trust = Offer(request), self._trust.setdefault(request, Trust())
        most = min(most, request.num_proposed, request.max_tokens - request.num_output - 1)
        for i in range(most):
            if (probability := trust.share ** (i + 1)) < LEAST_PROBABILITY:
                break
            offer.drafts.append(ON_DEVICE)
            offer.gain += probability
        return offer
