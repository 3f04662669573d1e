"""What one request's next tokens are guessed from: its own text, the client's prediction, and recent answers of its tenant."""

from array import array
from collections.abc import Sequence

import numpy as np

from engine.messages import ImageSpan
from engine.scheduler.drafts.suffixes import MATCH, Guess, Reader, SuffixAutomaton
from engine.scheduler.request import Request

MAX_TEXT = 1 << 14  # tokens: of a prompt its last, of a prediction its first; of text that has twice as many, the last are read again
MAX_LAG = 16  # tokens that are read before a guess; more are left to spare time
MIN_ANSWER = 8  # tokens that are worth to be remembered
HEAD = 8  # tokens before an answer by which its beginning is found
BREAK = -1  # instead of an image: a context does not reach across it

DECAY = 0.9  # of old hits and misses when another one comes
MAX_PAUSE = 64  # tokens


class Source:
    """Of one request. `guess` scores the last guess against what came, whether it was verified or not: to be wrong costs nothing."""

    def __init__(self, request: Request):
        self._request = request
        self._text = SuffixAutomaton()
        self._unread = _text_of(request)
        self._position = 0  # in it
        self._num_read = request.num_prompt  # of the sequence
        self._readers: list[Reader] = []
        self._num_followed = 0  # tokens that the readers have seen
        self._guess: Guess = []
        self._num_known = 0  # tokens before the guess
        self._hits, self._expected = 1.4, 2.0  # of late; at first a little less is right than it seems
        self._num_failures, self._resumes_at = 0, 0

    @property
    def trust(self) -> float:
        """How many of the guessed tokens were right, to how many should have been."""
        return min(1.0, self._hits / self._expected)

    @property
    def is_paused(self) -> bool:
        """Drafts failed one after the other."""
        return self._request.num_known < self._resumes_at

    @property
    def lag(self) -> int:
        """Tokens that wait to be read."""
        return len(self._unread) - self._position + self._request.num_known - self._num_read

    def guess(self, most: int, recent: Sequence[SuffixAutomaton]) -> Guess:
        """What follows the known tokens, by the longest context that stood somewhere."""
        num_known = self._request.num_known
        if num_known != self._num_known:
            self._score()
            self._guess = self._find(most, recent)
            self._num_known = num_known
        return self._guess

    def note(self, num_accepted: int) -> None:
        """Drafts were verified. If all fail again and again, they pause: for 1, 2, 4 ... tokens."""
        self._num_failures = 0 if num_accepted else self._num_failures + 1
        if self._num_failures > 1:
            self._resumes_at = self._request.num_known + min(MAX_PAUSE, 1 << (self._num_failures - 2))

    def read(self, num_tokens: int) -> None:
        """At most so many tokens of the request's own text."""
        if self._text.num_tokens >= 2 * MAX_TEXT:
            self._text, self._unread, self._position = SuffixAutomaton(), array("i"), 0
            self._num_read = max(self._request.num_prompt, self._request.num_known - MAX_TEXT)
        part = self._unread[self._position : self._position + num_tokens].tolist()
        self._position += len(part)
        while BREAK in part:
            end = part.index(BREAK)
            self._text.extend(part[:end])
            self._text.end_text()
            del part[: end + 1]
        self._text.extend(part)
        if self._position == len(self._unread):
            more = self._request.known_ids()[self._num_read :][:num_tokens].tolist()
            self._text.extend(more)
            self._num_read += len(more)

    def _find(self, most: int, recent: Sequence[SuffixAutomaton]) -> Guess:
        found = []
        if self.lag <= MAX_LAG:
            self.read(MAX_LAG)
            found.append(self._text.guess(most))
        self._follow(recent)
        found += [reader.guess(most) for reader in self._readers]
        return max(found, key=lambda one: one[0] if one[1] else 0, default=(0, []))[1]

    def _score(self) -> None:
        came = self._request.known_ids()[self._num_known :].tolist() if self._guess else []
        for token, (guessed, probability) in zip(came, self._guess, strict=False):
            self._hits = DECAY * self._hits + (token == guessed)
            self._expected = DECAY * self._expected + probability
            if token != guessed:
                break

    def _follow(self, recent: Sequence[SuffixAutomaton]) -> None:
        known = self._request.known_ids()
        old = {reader.automaton: reader for reader in self._readers}
        self._readers = []
        for automaton in recent:
            reader = old.get(automaton)
            start = self._num_followed if reader else 0
            reader = reader or Reader(automaton)
            reader.read(known[max(start, len(known) - MATCH) :].tolist())
            self._readers.append(reader)
        self._num_followed = len(known)


def answer_of(request: Request) -> Sequence[int]:
    """What others may be guessed from: the known output, behind the last tokens of the prompt's text; nothing of a short one."""
    ids: list[int] = request.known_ids()[_start_of_head(request) :].tolist()
    return ids if request.num_known - request.num_prompt >= MIN_ANSWER else []


def _start_of_head(request: Request) -> int:
    last_image = request.images[-1].end if request.images else 0
    return max(last_image, request.num_prompt - HEAD, 0)


def _text_of(request: Request) -> "array[int]":
    """The prediction as if it were the answer, then the prompt, with a BREAK for each image."""
    prompt = request.token_ids[: request.num_prompt]
    parts: list[np.ndarray] = []
    if len(request.prediction):
        parts += [prompt[_start_of_head(request) :], request.prediction[:MAX_TEXT], _BREAK]
    parts += _cut_at(prompt, request.images)
    return array("i", np.concatenate(parts).astype(np.int32).tobytes())


def _cut_at(prompt: np.ndarray, images: Sequence[ImageSpan]) -> list[np.ndarray]:
    """The last MAX_TEXT tokens of the prompt's text."""
    parts: list[np.ndarray] = []
    end, room = len(prompt), MAX_TEXT
    for span in reversed(images):
        parts = [_BREAK, prompt[max(span.end, end - room) : end], *parts]
        room -= len(parts[1])
        end = span.start
        if room <= 0:
            return parts
    return [prompt[max(0, end - room) : end], *parts]


_BREAK = np.array([BREAK], dtype=np.int32)
