"""Masks of the next tokens that the rows' grammars and allowed-token lists permit.

Rank 0 launches a step's forward pass, then waits for the previous step's tokens, passes them to the matchers and fills the masks while the
device is busy. A step without grammars waits for nothing. A matcher may take seconds for a token, so masks are filled in a thread (xgrammar
releases the interpreter lock) that is abandoned when a row's CPU time is used up.
"""

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.wire.arena import ArenaView
from engine.wire.messages import Admit, ErrorInfo
from engine.worker.sampling.samples import HostSamples
from engine.worker.staging import ALIGNMENT, Staging
from engine.worker.stopwatch import Stopwatch
from models.kernels.paged import Int32s

if TYPE_CHECKING:  # importing it takes seconds
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

logger = logging.getLogger(__name__)

NUM_CACHED = 64
INDEX_BYTES = 8
TOO_SLOW = ErrorInfo(400, "The grammar takes too long to evaluate.", code="invalid_grammar")
BROKEN = ErrorInfo(500, "The grammar could not be evaluated.", code="internal_error")
BUSY = ErrorInfo(503, "Too many grammars that take too long are being evaluated.", code="overloaded", retry_after=5)
# CPU seconds; tens of microseconds per token are usual.
TOKEN_S = 0.001  # average per token of a row
CREDIT_S = 0.05  # that a row may use in advance
STEP_S = 0.05  # for all rows of a step; afterwards each gets MIN_SHARE_S
MIN_SHARE_S = 0.002
POLL_S = 0.002
MAX_STUCK = 32  # abandoned threads that still run
LOWEST_PRIORITY = 19


@dataclass(slots=True, eq=False)
class Session:
    """Grammar and thinking budget of a row, and its masks in a step: of the next token and of those after each of the `proposed` ones."""

    matcher: "GrammarMatcher | None"
    after: int | None  # the grammar applies after this token; None once it has been sampled
    waiting: list[int]  # sampled tokens that have not been taken yet
    left: int | None = None  # tokens until `after` is forced; None: any number
    opening: Sequence[int] = ()  # `left` has no effect unless this is the first token
    is_over: bool = False  # the text is complete, or another rule made it violate the grammar
    credit: float = CREDIT_S
    error: ErrorInfo | None = None  # ends the request; the grammar is no longer enforced
    proposed: Sequence[int] = ()
    loading: "Future[GrammarMatcher] | None" = None  # of the matcher
    words: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    places: list[int] = field(default_factory=list)  # restricted rows of `words`

    @property
    def grammar(self) -> "GrammarMatcher | None":
        """Return the matcher if it restricts the next token."""
        return self.matcher if self.after is None and not self.is_over else None

    @property
    def usual_s(self) -> float:
        return TOKEN_S * (1 + len(self.waiting) + len(self.proposed))

    def take(self, token_id: int) -> None:
        if (matcher := self.grammar) is not None:
            self.is_over = not matcher.accept_token(token_id) or matcher.is_terminated()
        elif self.opening:
            self.left, self.opening = self.left if token_id in self.opening else None, ()
        elif token_id == self.after:
            self.after = None
        elif self.left is not None:
            self.left -= 1

    def fill(self) -> None:
        """Accept the waiting tokens, then fill the masks up to an impossible proposed token."""
        if self.loading is not None:
            self.matcher, self.loading = self.loading.result(), None
        for token in self.waiting:
            self.take(token)
        before, num_taken = (self.after, self.is_over, self.left, self.opening), 0
        self.places = []
        for place in range(1 + len(self.proposed)):
            matcher = self.grammar
            if matcher is not None:
                matcher.fill_next_token_bitmask(self.words, place)
                self.places.append(place)
            elif self.after is not None and self.left is not None and self.left <= 0 and not self.opening:
                self.words.numpy()[place] = bits_of([self.after], self.words.shape[1])
                self.places.append(place)
            if place == len(self.proposed):
                break
            self.take(self.proposed[place])
            if matcher is not None and self.is_over and not matcher.is_terminated():
                break
            num_taken += matcher is not None
        if self.proposed:
            if self.matcher is not None:
                self.matcher.rollback(num_taken)
            self.after, self.is_over, self.left, self.opening = before

    def charge(self, seconds: float) -> None:
        self.credit = min(CREDIT_S, self.credit + self.usual_s - seconds)
        self.waiting.clear()
        if self.credit < 0:
            self.error = TOO_SLOW


class MaskThread(threading.Thread):
    """Fills the masks of a step's sessions in their order. `spent`: CPU seconds of the step before this thread."""

    def __init__(self, sessions: Sequence[Session], spent: float) -> None:
        super().__init__(name="masks", daemon=True)
        self._lock = threading.Lock()  # guards the rest
        self._left, self._spent, self._began, self._is_abandoned = deque(sessions), spent, 0.0, False

    def cpu_time(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident or 0))

    def run(self) -> None:
        while self._left:
            try:
                self._left[0].fill()
            except RuntimeError:
                logger.exception("a grammar could not be evaluated")
                self._left[0].error = BROKEN
            with self._lock:
                if self._is_abandoned:
                    return
                now = self.cpu_time()
                self._left.popleft().charge(now - self._began)
                self._began = now

    def rest(self) -> list[Session]:
        """Wait until the masks are filled, or the first of the returned sessions takes too long: the thread uses no other one."""
        while True:
            self.join(POLL_S)
            with self._lock:
                if not self._left:
                    return []
                session, share = self._left[0], max(MIN_SHARE_S, STEP_S - self._spent - self._began)
                if self.cpu_time() - self._began > session.usual_s + min(session.credit, share):
                    self._is_abandoned = True
                    return list(self._left)


def fill_masks(sessions: Sequence[Session], stuck: list[MaskThread]) -> None:
    """Fill the sessions' masks, or set their errors. `stuck`: abandoned threads."""
    stuck[:] = [thread for thread in stuck if thread.is_alive()]
    spent = 0.0
    while sessions:
        if len(stuck) >= MAX_STUCK:
            for session in sessions:
                session.error = BUSY
            return
        thread = MaskThread(sessions, spent)
        thread.start()
        if sessions := thread.rest():
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LOWEST_PRIORITY)
            stuck.append(thread)
            sessions.pop(0).error, spent = TOO_SLOW, STEP_S


Pending = tuple[list[Session | None], HostSamples, torch.Tensor, Stopwatch]  # tokens of a step that matchers have not accepted yet
Mask = tuple[torch.Tensor, torch.Tensor]  # `index_A` and `allowed_AW` of `SamplingOps.mask_`


def bits_of(token_ids: Sequence[int], num_words: int) -> Int32s:
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[np.asarray(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class TokenRules:
    """Grammars and allowed tokens of all rows, for steps of up to `max_samples`."""

    def __init__(self, model_folder: Path, max_samples: int, vocab_size: int, device: torch.device):
        self._folder = model_folder
        self._num_words = -(-vocab_size // 32)
        self._limited: dict[int, tuple[Session | None, Int32s | None]] = {}  # rows: grammar, and mask of the allowed tokens
        self._pending: deque[Pending] = deque()
        self._staging = Staging(max_samples * (4 * self._num_words + INDEX_BYTES) + 2 * ALIGNMENT, device)
        self._stuck: list[MaskThread] = []
        self._vocabulary: TokenizerInfo | None = None
        self._compiled_of = functools.lru_cache(NUM_CACHED)(self._read)  # many requests share few
        self._loader = ThreadPoolExecutor(1, "grammars")

    def load(self) -> None:
        from engine.grammar.compile import read_vocabulary

        self._vocabulary = self._vocabulary or read_vocabulary(self._folder)

    def load_early(self) -> None:
        """Load in a thread, for the first grammar, which would wait for it."""
        if self._vocabulary is None:
            self._loader.submit(self.load)

    def admit(self, admit: Admit, arena: ArenaView | None) -> None:
        """Assign the row to a request. `arena`: None on ranks that do not sample."""
        self._limited.pop(admit.row, None)
        session, allowed, think_ids = None, admit.params.allowed_token_ids, admit.params.think_ids
        if (admit.grammar is not None or think_ids) and arena is not None:
            session = Session(None, None, list(admit.output_ids), admit.params.thinking_token_budget, think_ids[:-1])
            session.after = think_ids[-1] if think_ids else None
            if admit.grammar is not None:
                region, session.after = admit.grammar.region, admit.grammar.after
                data = bytes(arena.view(region.offset, region.length))
                session.loading = self._loader.submit(self._new_matcher, data)  # takes up to 64 ms, during the forward pass
        if session is not None or allowed:
            self._limited[admit.row] = session, bits_of(allowed, self._num_words) if allowed else None

    def masks(self, samples: HostSamples, proposing: Stopwatch) -> Mask | None:
        """Return the masks of permitted tokens; None if all are permitted. If a row has a grammar, wait for the previous tokens and for
        `proposing`, after which proposed ones are on the host."""
        if self._limited.keys().isdisjoint(samples.rows.tolist()):
            return None
        found = [(first, *self._limited[row], proposed) for first, row, proposed in samples.per_row() if row in self._limited]
        if any(session is not None for _, session, _, _ in found):
            proposing.wait()
            while self._pending:
                self._take(self._pending.popleft())
        sessions: list[Session] = []
        for _, session, _, proposed in found:
            if session is not None and session.error is None:
                session.proposed, session.words = proposed, torch.full((1 + len(proposed), self._num_words), -1, dtype=torch.int32)
                sessions.append(session)
        fill_masks(sessions, self._stuck)
        limited: list[int] = []
        words: list[Int32s] = []
        for first, session, allowed, proposed in found:
            if session is not None and session.error is not None:
                continue  # its tokens are not used
            for place in range(1 + len(proposed)) if session is None or allowed is not None else session.places:
                masks = [mask for mask in (allowed, None if session is None else session.words[place].numpy()) if mask is not None]
                words.append(functools.reduce(np.bitwise_and, masks))
                limited.append(first + place)
        if not limited:
            return None
        self._staging.begin()
        index_A = self._staging.put(np.asarray(limited, dtype=np.int64))
        allowed_AW = self._staging.put(np.stack(words))
        self._staging.copy()
        return index_A, allowed_AW

    def note(self, samples: HostSamples, tokens_S: torch.Tensor, watch: Stopwatch) -> dict[int, ErrorInfo]:
        """Note sampled tokens, which are on the host when `watch` is done. Return errors by index among the sampled chunks."""
        if self._limited.keys().isdisjoint(samples.rows.tolist()):
            return {}
        sessions = [self._limited.get(row, (None, None))[0] for _, row, _ in samples.per_row()]
        if not any(sessions):
            return {}
        self._pending.append((sessions, samples, tokens_S, watch))
        return {index: session.error for index, session in enumerate(sessions) if session is not None and session.error is not None}

    def _take(self, pending: Pending) -> None:
        sessions, samples, tokens_S, watch = pending
        watch.wait()
        tokens = tokens_S.tolist()
        for session, kept in zip(sessions, samples.kept(tokens), strict=True):
            if session is not None and session.error is None:
                session.waiting += [tokens[index] for index in kept]

    def _new_matcher(self, data: bytes) -> "GrammarMatcher":
        from xgrammar import GrammarMatcher

        return GrammarMatcher(self._compiled_of(data))

    def _read(self, data: bytes) -> "CompiledGrammar":
        from xgrammar import CompiledGrammar

        self.load()
        assert self._vocabulary is not None
        return CompiledGrammar.deserialize_json(data.decode(), self._vocabulary)
