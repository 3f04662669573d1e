"""What every drafter shares: the protocol, which rows of the next step get drafts, and how far a request's drafts are trusted.

A row is verified in one step with its drafts, so that the next step can only be planned when it is known how many hold: while other rows
are planned ahead, a row with drafts waits. It is held back for that only if the drafts should bring more than the wait costs. Prompts come
first: as long as any wait or are computed there are no drafts. Neither are there with many rows, where each verified token takes time.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from engine.scheduler.request import Request
from engine.scheduler.state import State
from engine.wire.messages import MAX_DRAFTS

LEAST_PROBABILITY = 0.2  # that a draft holds, and all before it
LEAST_GAIN = 0.4  # tokens that the drafts of a row bring: more than it loses while host and device wait for each other
LEAST_GAIN_BESIDE = 1.1  # in a step with rows that are planned ahead: the row is not in every other step
DECAY = 0.9  # of old hits and misses when another one comes
MAX_PAUSE = 64  # tokens

Guess = list[tuple[int, float]]  # tokens, each with the probability that it follows the one before


@dataclass(slots=True)
class Offer:
    """Drafts for a row, and the number of them that should hold."""

    request: Request
    drafts: list[int] = field(default_factory=list)
    gain: float = 0.0


class Drafter(Protocol):
    """Proposes draft tokens for all requests."""

    @property
    def num_sources(self) -> int:
        """Requests about which something is remembered; 0 when all have ended."""

    def offer(self, state: State) -> None:
        """Before a plan: set the drafts of rows whose results are all in, and hold back rows that should get some then."""

    def note(self, request: Request, num_accepted: int) -> None:
        """A row's drafts were verified."""

    def release(self, request: Request) -> None:
        """The request has ended."""

    def use_spare_time(self) -> bool:
        """Do a small part of the work that waits. Return False if there is none."""


@dataclass(slots=True)
class Trust:
    """How often the draft tokens of one request hold. Every guess is compared with what came, whether it was verified or not."""

    hits: float = 1.4
    expected: float = 2.0  # at first a little less is right than it seems
    guess: Guess = field(default_factory=list)
    num_known: int = 0  # tokens before the guess
    num_failures: int = 0
    resumes_at: int = 0

    @property
    def share(self) -> float:
        """How many of the guessed tokens were right, to how many should have been."""
        return min(1.0, self.hits / self.expected)

    def is_paused(self, request: Request) -> bool:
        """Whether drafts failed one after the other."""
        return request.num_known < self.resumes_at

    def score(self, request: Request) -> None:
        """Compare the last guess with the tokens that came."""
        came = request.known_ids()[self.num_known :].tolist() if self.guess else []
        for token, (guessed, probability) in zip(came, self.guess, strict=False):
            self.hits = DECAY * self.hits + (token == guessed)
            self.expected = DECAY * self.expected + probability
            if token != guessed:
                break
        self.num_known = request.num_known

    def note(self, request: Request, num_accepted: int) -> None:
        """Drafts were verified. If all fail again and again, they pause: for 1, 2, 4 ... tokens."""
        self.num_failures = 0 if num_accepted else self.num_failures + 1
        if self.num_failures > 1:
            self.resumes_at = request.num_known + min(MAX_PAUSE, 1 << (self.num_failures - 2))


def most_drafts(rows: Iterable[Request], verify_rows: int) -> int:
    """Drafts that each row may get. `verify_rows`: query rows of a step that cost little more than one."""
    num_rows = len([*rows])
    return min(MAX_DRAFTS, verify_rows // num_rows - 1) if num_rows else 0


def give_drafts(state: State, verify_rows: int, make_offer: Callable[[Request, int], Offer]) -> None:
    """`Drafter.offer`; `make_offer` is asked for at most so many drafts of a row, or for none if prompts come first."""
    rows = [request for request in state.running if request.num_output < request.max_tokens]
    most = most_drafts(rows, verify_rows)
    is_quiet = not state.waiting and all(request.is_decoding for request in rows)
    offers, num_steady = [], 0
    for request in rows:
        if request.drafts and request.num_drawn:
            continue  # they are on the way
        request.drafts, request.is_held = (), False
        offer = make_offer(request, most if is_quiet else 0) if most > 0 else Offer(request)
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
