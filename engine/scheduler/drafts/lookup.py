"""Prompt lookup, `--draft lookup`: propose what followed the last tokens earlier in the request's prompt, output and prediction.

The longest known context, of a few lengths, is found by its hash. Reading a token takes one operation per length.
"""

from array import array
from collections.abc import Iterable

import numpy as np

from engine.scheduler.drafts.drafter import LEAST_PROBABILITY, Offer, Proposal, Trust, give_drafts
from engine.scheduler.proposer import Proposer
from engine.scheduler.request import Request
from engine.scheduler.state import State

CONTEXTS = (16, 8, 4, 2, 1)  # lengths in tokens of the contexts looked up, the longest first
FACTOR, PRIME = 1_000_003, (1 << 61) - 1  # of the rolling hash of a context
_LEAVING = [pow(FACTOR, length, PRIME) for length in CONTEXTS]  # factor of the token that leaves a context
_NOTHING = [sum(pow(FACTOR, i, PRIME) for i in range(length)) % PRIME for length in CONTEXTS]  # hash of token ids 0: the hash uses id + 1
UNSURE = 0.6  # pseudo-count of other tokens after a context of one token
MIN_PATH = 0.05  # least probability of all tokens of a draft

MAX_IN_FLIGHT = 3  # most tokens of a row in flight when a draft is made
MAX_TEXT = 1 << 14  # tokens kept: the last of a prompt, the first of a prediction, the last of a sequence once the text is full
MAX_LAG = 16  # most tokens read before a draft; if more are unread, they wait for spare time
SLICE = 128  # tokens read between two checks for messages: 0.2 ms
HEAD = 8  # tokens before an answer that identify its beginning


class Contexts:
    """Text, and the majority token after each context by a majority vote: the same token adds a vote, another one removes it. Each negative
    id is a unique separator that no context crosses."""

    def __init__(self) -> None:
        self._tokens = array("i", [0] * (1 + CONTEXTS[0]))
        self._hashes = list(_NOTHING)  # of the last tokens; a context's hash differs from that of a shorter one after zeros
        self._followers: dict[int, tuple[int, int, int]] = {}  # hash of a context -> token, its votes, occurrences of the context

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        followers = self._followers
        for token in tokens:
            first = token, 1, 1  # shared by all new contexts
            for key in self._hashes:
                if (known := followers.get(key)) is None:
                    followers[key] = first
                elif known[0] == token or known[1] == 1:
                    followers[key] = token, known[1] + (known[0] == token), known[2] + 1
                else:
                    followers[key] = known[0], known[1] - 1, known[2] + 1
            self._tokens.append(token)
            _roll(self._hashes, self._tokens)

    def propose(self, most: int) -> Proposal:
        """Propose at most `most` tokens: repeatedly the one that followed the longest known context."""
        hashes, tokens = self._hashes.copy(), self._tokens[-1 - CONTEXTS[0] :]
        found: Proposal = []
        path = 1.0
        while len(found) < most:
            length, key = next(((length, key) for length, key in zip(CONTEXTS, hashes, strict=True) if key in self._followers), (0, 0))
            if not length:
                break
            token, votes, total = self._followers[key]
            path *= (share := votes / (total + UNSURE / length))
            if token < 0 or path < MIN_PATH:
                break
            found.append((token, share))
            tokens.append(token)
            _roll(hashes, tokens)
        return found


def _roll(hashes: list[int], tokens: "array[int]") -> None:
    token = tokens[-1]
    for i, length in enumerate(CONTEXTS):
        hashes[i] = (hashes[i] * FACTOR + token + 1 - (tokens[-1 - length] + 1) * _LEAVING[i]) % PRIME


class Source:
    def __init__(self, request: Request):
        self.trust = Trust()
        self._request = request
        self._contexts = Contexts()
        self._unread = _text_of(request)
        self._position = 0  # in `_unread`
        self._num_read = request.num_prompt  # tokens of the sequence already read

    @property
    def lag(self) -> int:
        return len(self._unread) - self._position + self._request.num_known - self._num_read

    def propose(self, most: int) -> Proposal:
        if self._request.num_known != self.trust.num_known:
            self.trust.score(self._request)
            self.trust.proposal = []
            if self.lag <= MAX_LAG:
                self.read(MAX_LAG)
                self.trust.proposal = self._find(most)
        return self.trust.proposal

    def _find(self, most: int) -> Proposal:
        return self._contexts.propose(most)

    def read(self, num_tokens: int) -> None:
        if len(self._contexts) >= 3 * MAX_TEXT:
            self._contexts, self._unread, self._position = Contexts(), array("i"), 0
            self._num_read = max(self._request.num_prompt, self._request.num_known - MAX_TEXT)
        self._contexts.extend(self._unread[self._position : self._position + num_tokens])
        self._position = min(len(self._unread), self._position + num_tokens)
        if self._position == len(self._unread):
            more = self._request.known_ids()[self._num_read :][:num_tokens].tolist()
            self._contexts.extend(more)
            self._num_read += len(more)


class LookupDrafter(Proposer):
    def __init__(self, verify_rows: int):
        self._verify_rows = verify_rows
        self._sources: dict[Request, Source] = {}

    @property
    def num_sources(self) -> int:
        return len(self._sources)

    def offer(self, state: State) -> None:
        give_drafts(state, self._verify_rows, self._offer)

    def note(self, request: Request, num_accepted: int) -> None:
        self._sources[request].trust.note(request, num_accepted)

    def release(self, request: Request) -> None:
        self._sources.pop(request, None)

    def use_spare_time(self) -> bool:
        late = next((source for source in self._sources.values() if source.lag > 0), None)
        if late is not None:
            late.read(SLICE)
        return late is not None

    def _offer(self, request: Request, most: int) -> Offer:
        """Return drafts after the tokens in flight, which must match the proposal, too. A request's last token is always sampled."""
        offer, num_in_flight = Offer(request), request.num_sampled
        if request not in self._sources:
            self._sources[request] = Source(request)
        if most == 0:
            return offer
        source = self._sources[request]
        proposal, trust, probability = source.propose(most + MAX_IN_FLIGHT), source.trust, 1.0
        most = 0 if trust.is_paused(request) else min(most, request.max_tokens - request.num_output - 1)
        for i, (token, share) in enumerate(proposal[: num_in_flight + max(0, most)]):
            probability *= share * trust.share
            if probability < LEAST_PROBABILITY:
                break
            if i >= num_in_flight:
                offer.drafts.append(token)
                offer.gain += probability
        return offer


def _text_of(request: Request) -> "array[int]":
    """Return the prediction as if it were the answer, then the prompt's last MAX_TEXT tokens, with one separator per image."""
    prompt = request.token_ids[: request.num_prompt].copy()
    text_start = request.images[-1].end if request.images else 0
    for i, span in enumerate(request.images):
        prompt[span.start : span.end] = -2 - i
    is_text = prompt >= 0
    is_text[[span.start for span in request.images]] = True  # one separator per image
    parts = [prompt[is_text][-MAX_TEXT:]]
    if request.prediction is not None:
        parts = [prompt[max(text_start, request.num_prompt - HEAD) :], request.prediction[:MAX_TEXT], np.array([-1], np.int32), *parts]
    return array("i", np.concatenate(parts).astype(np.int32).tobytes())
