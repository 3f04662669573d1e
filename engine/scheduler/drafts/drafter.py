"""Which rows of the next step get drafts, and which ones.

A row is verified in one step with its drafts, so that the next step can only be planned when it is known how many hold: while other rows
are planned ahead, a row with drafts waits. It is held back for that only if the drafts should bring more than the wait costs. Prompts come
first: as long as any wait or are computed there are no drafts. Neither are there with many rows, where each verified token takes time.
"""

from dataclasses import dataclass, field

from engine.messages import MAX_DRAFTS
from engine.scheduler.drafts.recent import RecentAnswers
from engine.scheduler.drafts.source import Source, answer_of
from engine.scheduler.drafts.suffixes import Guess
from engine.scheduler.request import Request
from engine.scheduler.state import State

MAX_AHEAD = 3  # tokens of a row that are on the way when a guess is made
LEAST_PROBABILITY = 0.2  # that a draft holds, and all before it
LEAST_GAIN = 0.4  # tokens that the drafts of a row bring: more than it loses while host and device wait for each other
LEAST_GAIN_BESIDE = 1.1  # beside rows that are planned ahead: the row is not in every other step
SLICE = 64  # tokens that are read before messages are looked for: 0.2 ms


@dataclass(slots=True)
class Offer:
    """Drafts for a row, and how many of them should hold."""

    request: Request
    drafts: list[int] = field(default_factory=list)
    gain: float = 0.0


class Drafter:
    """Guesses for all requests. `verify_rows`: query rows of a step that cost little more than one."""

    def __init__(self, verify_rows: int):
        self._verify_rows = verify_rows
        self._sources: dict[Request, Source] = {}
        self.recent = RecentAnswers()

    @property
    def num_sources(self) -> int:
        return len(self._sources)

    def offer(self, state: State) -> None:
        """Before a plan: sets the drafts of rows whose results are all in, and holds back rows that should get some then."""
        rows = [request for request in state.running if request.num_output < request.max_tokens]
        most = min(MAX_DRAFTS, self._verify_rows // len(rows) - 1) if rows else 0
        is_quiet = not state.waiting and all(request.is_decoding for request in rows)
        offers, num_steady = [], 0
        for request in rows:
            if request.drafts and request.num_drawn:
                continue  # they are on the way
            request.drafts, request.is_held = (), False
            if most > 0 and request not in self._sources:
                self._sources[request] = self._make_source(request)
            offer = self._offer(request, most) if most > 0 and is_quiet else Offer(request)
            if offer.gain >= LEAST_GAIN:
                offers.append(offer)
            else:
                num_steady += 1
        if num_steady:
            offers = [offer for offer in offers if offer.gain >= LEAST_GAIN_BESIDE]
        for offer in offers:
            if offer.request.num_drawn:
                offer.request.is_held = True
            else:
                offer.request.drafts = tuple(offer.drafts)

    def note(self, request: Request, num_accepted: int) -> None:
        """A row's drafts were verified."""
        self._sources[request].note(num_accepted)

    def release(self, request: Request) -> None:
        """It has ended; others of its tenant may be guessed from its answer."""
        self._sources.pop(request, None)
        self.recent.add(request.wire.tenant, answer_of(request))

    def use_spare_time(self) -> bool:
        """Reads a little of what waits. False if nothing does."""
        behind = next((source for source in self._sources.values() if source.lag > 0), None)
        if behind is not None:
            behind.read(SLICE)
            return True
        return self.recent.read(SLICE)

    def guess(self, request: Request, most: int) -> Guess:
        """At most `most` tokens behind the known ones, each with the probability that it follows the one before."""
        return self._sources[request].guess(most, self.recent.of(request.wire.tenant))

    def _make_source(self, request: Request) -> Source:
        return Source(request)

    def _offer(self, request: Request, most: int) -> Offer:
        """Behind the tokens on the way, which have to be as guessed, too. The last token may not be a draft: one more is drawn."""
        offer, source, num_ahead = Offer(request), self._sources[request], request.num_drawn
        guess = self.guess(request, most + MAX_AHEAD)
        most = 0 if source.is_paused else min(most, request.max_tokens - request.num_output - 1)
        trust, probability = source.trust, 1.0
        for i, (token, share) in enumerate(guess[: num_ahead + max(0, most)]):
            probability *= share * trust
            if probability < LEAST_PROBABILITY:
                break
            if i >= num_ahead:
                offer.drafts.append(token)
                offer.gain += probability
        return offer
