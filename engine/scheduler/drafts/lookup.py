"""Prompt lookup, `--draft lookup`: propose what followed the longest earlier occurrence of the last tokens in the request's prompt and
output."""

import numpy as np
import numpy.typing as npt

from engine.scheduler.core import Proposer
from engine.scheduler.drafts.drafter import LEAST_PROBABILITY, Offer, Proposal, Trust, give_drafts
from engine.scheduler.request import Request
from engine.scheduler.state import State

CONTEXTS = (1, 2, 4, 8, 16)  # lengths in tokens
LONGEST = CONTEXTS[-1]
MAX_PLACES = 64  # latest occurrences of the last two tokens that are compared
UNSURE = 0.6  # pseudo-count of other tokens after a context of one token
MAX_IN_FLIGHT = 3  # most tokens of a row in flight when a draft is made
MAX_TEXT = 1 << 14  # tokens kept of a prompt, the last


class Source:
    """Text of a request: the end of its prompt, and its output. Negative ids are separators."""

    def __init__(self, request: Request):
        self.trust = Trust()
        self._request = request
        before = _text_before(request)
        self._end = len(before) - request.num_prompt  # plus a position of the sequence: its index in the text
        self._text = np.empty(len(before) + len(request.token_ids) - request.num_prompt, dtype=np.int32)
        self._text[: len(before)] = before
        self._num_read = request.num_prompt

    def propose(self, most: int) -> Proposal:
        request = self._request
        if request.num_known != self.trust.num_known:
            self.trust.score(request)
            self._text[self._end + self._num_read : self._end + request.num_known] = request.known_ids()[self._num_read :]
            self._num_read = request.num_known
            self.trust.proposal = self._find(most)
        return self.trust.proposal

    def _find(self, most: int) -> Proposal:
        return find(self._text[: self._end + self._num_read], most)


def find(text: npt.NDArray[np.int32], most: int) -> Proposal:
    """Return at most `most` tokens, each of which mostly followed the longest context of CONTEXTS that occurs earlier in the text, which
    begins with LONGEST separators."""
    is_last = text[1:-1] == text[-1]
    pairs = np.flatnonzero(is_last & (text[:-2] == text[-2]))
    ends = 1 + (pairs if len(pairs) else np.flatnonzero(is_last))[-MAX_PLACES:]
    tail = text[: -LONGEST - 1 : -1]
    lengths = np.logical_and.accumulate((text[ends[:, None] - np.arange(LONGEST)] == tail) & (tail >= 0), axis=1).sum(axis=1)
    length = max((each for each in CONTEXTS if each <= lengths.max(initial=0)), default=LONGEST)
    followers = [text[end + 1 : end + 1 + most].tolist() for end in ends[lengths >= length][::-1].tolist()]  # the latest first
    proposal: Proposal = []
    while followers:
        tokens = [each[0] for each in followers]
        token = max(tokens, key=tokens.count)
        if token < 0:
            break
        proposal.append((token, tokens.count(token) / (len(followers) + UNSURE / (length + len(proposal)))))
        followers = [each[1:] for each in followers if each[0] == token and len(each) > 1]
    return proposal


class LookupDrafter(Proposer):
    def __init__(self, verify_rows: int):
        self._verify_rows = verify_rows
        self._sources: dict[Request, Source] = {}

    def offer(self, state: State) -> None:
        give_drafts(state, self._verify_rows, self._offer)

    def release(self, request: Request) -> None:
        self._sources.pop(request, None)

    def _offer(self, request: Request, most: int) -> Offer:
        """Return drafts after the tokens in flight, which must match the proposal, too. A request's last token is always sampled."""
        offer, num_in_flight = Offer(request), request.num_sampled
        if request not in self._sources:
            self._sources[request] = Source(request)
        if most == 0:
            return offer
        source = self._sources[request]
        proposal, trust, probability = source.propose(most + MAX_IN_FLIGHT), source.trust, 1.0
        most = min(most, request.max_tokens - request.num_output - 1)
        for i, (token, share) in enumerate(proposal[: num_in_flight + max(0, most)]):
            probability *= share * trust.share
            if probability < LEAST_PROBABILITY:
                break
            if i >= num_in_flight:
                offer.drafts.append(token)
                offer.gain += probability
        return offer


def _text_before(request: Request) -> npt.NDArray[np.int32]:
    """Return the prompt's last MAX_TEXT tokens, with one separator per image."""
    prompt = request.token_ids[: request.num_prompt].copy()
    for span in request.images:
        prompt[span.start : span.end] = -1
    is_text = prompt >= 0
    is_text[[span.start for span in request.images]] = True
    return np.concatenate((np.full(LONGEST, -1), prompt[is_text][-MAX_TEXT:])).astype(np.int32)
