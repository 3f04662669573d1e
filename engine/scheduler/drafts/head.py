"""Drafts by the model's own head: `--draft mtp`. The worker computes them behind each step, and they come with its result."""

from collections.abc import Sequence

from engine.messages import MAX_GUESSES
from engine.scheduler.drafts.drafter import LEAST_PROBABILITY, Drafter, Offer
from engine.scheduler.drafts.source import Source
from engine.scheduler.drafts.suffixes import Guess, SuffixAutomaton
from engine.scheduler.request import Request
from engine.scheduler.state import State


class HeadSource(Source):
    """Its guesses are the head's. A guess holds with the probability `trust`, if those before it do."""

    @property
    def lag(self) -> int:
        """It reads nothing."""
        return 0

    @property
    def num_worth(self) -> int:
        """Guesses behind a step that should hold often enough; one at least, to know better later."""
        return max(1, sum(self.trust**count >= LEAST_PROBABILITY for count in range(1, MAX_GUESSES + 1)))

    def _find(self, most: int, recent: Sequence[SuffixAutomaton]) -> Guess:
        return [(token, 1.0) for token in self._request.guesses]


class HeadDrafter(Drafter):
    """Rows are held back for guesses that their results will bring."""

    def offer(self, state: State) -> None:
        super().offer(state)
        num_rows = min(len(state.running) + len(state.waiting), state.limits.max_num_seqs)
        most = min(MAX_GUESSES, self._verify_rows // max(1, num_rows) - 1)
        worth = (source.num_worth if isinstance(source, HeadSource) else MAX_GUESSES for source in self._sources.values())
        state.num_guesses = max(0, min(most, max(worth, default=MAX_GUESSES)))

    def release(self, request: Request) -> None:
        self._sources.pop(request, None)

    def _make_source(self, request: Request) -> Source:
        return HeadSource(request)

    def _offer(self, request: Request, most: int) -> Offer:
        """What is on the way need not be as guessed: other guesses come with it."""
        offer, source = Offer(request), self._sources[request]
        drafts = [token for token, _ in self.guess(request, MAX_GUESSES)]
        most = 0 if source.is_paused else min(most, MAX_GUESSES, request.max_tokens - request.num_output - 1)
        for i in range(most if request.num_drawn else min(most, len(drafts))):
            if (probability := source.trust ** (i + 1)) < LEAST_PROBABILITY:
                break
            offer.drafts += drafts[i : i + 1]
            offer.gain += probability
        return offer
