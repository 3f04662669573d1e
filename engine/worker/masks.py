"""Masks of the next tokens that the rows' grammars and allowed-token lists permit.

Rank 0 launches a step's forward pass, then waits for the previous step's tokens, passes them to the matchers and fills the masks while the
device is busy. A step without grammars waits for nothing. A matcher may take seconds for a token, so masks are filled in a thread (xgrammar
releases the interpreter lock) that is abandoned when the step's CPU time is used up.
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
TOKEN_S = 0.001  # per token
STEP_S = 0.05  # in addition, per step
AFTER_S = 0.002  # instead of STEP_S, once a row has used it up
POLL_S = 0.002
MAX_STUCK = 32  # abandoned threads that still run
LOWEST_PRIORITY = 19


@dataclass(slots=True, eq=False)
class Session:
    """Rules of a row, and its masks in a step: of the next token and of those after each of the `proposed` ones."""

    matcher: "Future[GrammarMatcher] | None" = None
    after: int | None = None  # the grammar applies after this token; None once it has been sampled
    waiting: Sequence[int] = ()  # sampled tokens that have not been taken yet
    left: int | None = None  # tokens until `after` is forced; None: any number
    opening: Sequence[int] = ()  # `left` has no effect unless this is the first token
    allowed: Int32s | None = None  # mask
    is_over: bool = False  # the text is complete, or another rule made it violate the grammar
    error: ErrorInfo | None = None  # ends the request; the grammar is no longer enforced
    proposed: Sequence[int] = ()
    words: Int32s = field(init=False)

    @property
    def reads_tokens(self) -> bool:
        return self.matcher is not None or self.after is not None

    @property
    def grammar(self) -> "GrammarMatcher | None":
        """Return the matcher if it restricts the next token."""
        return self.matcher.result() if self.matcher is not None and self.after is None and not self.is_over else None

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
        for token in self.waiting:
            self.take(token)
        self.waiting = ()
        before, num_taken = (self.after, self.is_over, self.left, self.opening), 0
        for place in range(len(self.words)):
            if (matcher := self.grammar) is not None:
                matcher.fill_next_token_bitmask(self.words, place)
            elif self.after is not None and self.left is not None and self.left <= 0 and not self.opening:
                self.words[place] = bits_of([self.after], self.words.shape[1])
            if self.allowed is not None:
                self.words[place] &= self.allowed
            if place < len(self.proposed):
                self.take(self.proposed[place])
                if matcher is not None and self.is_over and not matcher.is_terminated():
                    break
                num_taken += matcher is not None
        if num_taken and self.matcher is not None:
            self.matcher.result().rollback(num_taken)
        self.after, self.is_over, self.left, self.opening = before


class MaskThread(threading.Thread):
    """Fills the masks of sessions in their order, in up to `limit` CPU seconds in addition to the usual ones."""

    def __init__(self, sessions: Sequence[Session], limit: float) -> None:
        super().__init__(name="masks", daemon=True)
        self._lock = threading.Lock()  # guards the rest
        self._left, self._limit, self._is_abandoned = deque(sessions), limit, False

    def cpu_time(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident or 0))

    def run(self) -> None:
        while self._left:
            session = self._left[0]
            self._limit += TOKEN_S * (1 + len(session.waiting) + len(session.proposed))
            try:
                session.fill()
            except (RuntimeError, ValueError):
                logger.exception("a grammar could not be evaluated")
                session.error = BROKEN
            with self._lock:
                if self._is_abandoned:
                    return
                self._left.popleft()

    def rest(self) -> list[Session]:
        """Wait until the masks are filled, or the limit is exceeded: then the thread uses the first of the returned sessions only."""
        while True:
            self.join(POLL_S)
            with self._lock:
                if not self._left:
                    return []
                if self.cpu_time() > self._limit:
                    self._is_abandoned = True
                    return list(self._left)


def fill_masks(sessions: Sequence[Session], stuck: list[MaskThread]) -> None:
    """Fill the sessions' masks, or set their errors. `stuck`: abandoned threads."""
    stuck[:] = [thread for thread in stuck if thread.is_alive()]
    limit = STEP_S
    while sessions:
        if len(stuck) >= MAX_STUCK:
            for session in sessions:
                session.error = BUSY
            return
        thread = MaskThread(sessions, limit)
        thread.start()
        if sessions := thread.rest():
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LOWEST_PRIORITY)
            stuck.append(thread)
            sessions.pop(0).error, limit = TOO_SLOW, AFTER_S


Pending = tuple[list[Session | None], HostSamples, torch.Tensor, Stopwatch]  # tokens of a step that sessions have not taken yet
Mask = tuple[torch.Tensor, torch.Tensor]  # `index_A` and `allowed_AW` of `SamplingOps.mask_`


def bits_of(token_ids: Sequence[int], num_words: int) -> Int32s:
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[np.asarray(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@functools.cache
def vocabulary_of(model_folder: Path) -> "TokenizerInfo":
    from engine.grammar.compile import read_vocabulary

    return read_vocabulary(model_folder)


class TokenRules:
    """Grammars and allowed tokens of all rows, for steps of up to `max_samples`."""

    def __init__(self, model_folder: Path, max_samples: int, vocab_size: int, device: torch.device):
        self._folder = model_folder
        self._num_words = -(-vocab_size // 32)
        self._sessions: dict[int, Session] = {}  # by row
        self._pending: deque[Pending] = deque()
        self._staging = Staging(max_samples * (4 * self._num_words + INDEX_BYTES) + 2 * ALIGNMENT, device)
        self._stuck: list[MaskThread] = []
        self._compiled_of = functools.lru_cache(NUM_CACHED)(self._read)  # many requests share few
        self._loader = ThreadPoolExecutor(1, "grammars")

    def load(self) -> None:
        vocabulary_of(self._folder)

    def load_early(self) -> Future[None]:
        """Load in a thread, for the first grammar, which would wait for it."""
        return self._loader.submit(self.load)

    def admit(self, admit: Admit, arena: ArenaView | None) -> None:
        """Assign the row to a request. `arena`: None on ranks that do not sample."""
        self._sessions.pop(admit.row, None)
        allowed, think_ids, wire = admit.params.allowed_token_ids, admit.params.think_ids, admit.grammar
        if arena is None or not (wire or think_ids or allowed):
            return
        session = self._sessions[admit.row] = Session(
            after=think_ids[-1] if think_ids else None, waiting=admit.output_ids,
            left=admit.params.thinking_token_budget, opening=think_ids[:-1],
            allowed=bits_of(allowed, self._num_words) if allowed else None,
        )  # fmt: skip
        if wire is not None:
            data, session.after = bytes(arena.view(wire.region.offset, wire.region.length)), wire.after
            session.matcher = self._loader.submit(self._new_matcher, data)  # takes up to 64 ms, during the forward pass

    def masks(self, samples: HostSamples, proposing: Stopwatch) -> Mask | None:
        """Return the masks of permitted tokens; None if all are permitted. If a row has a grammar, wait for the previous tokens and for
        `proposing`, after which proposed ones are on the host."""
        if self._sessions.keys().isdisjoint(samples.rows.tolist()):
            return None
        rows = ((first, self._sessions.get(row), proposed) for first, row, proposed in samples.per_row())
        found = [(first, session, proposed) for first, session, proposed in rows if session is not None and session.error is None]
        if any(session.reads_tokens for _, session, _ in found):
            proposing.wait()
            while self._pending:
                self._take(self._pending.popleft())
        for _, session, proposed in found:
            session.proposed, session.words = proposed, np.full((1 + len(proposed), self._num_words), -1, dtype=np.int32)
        fill_masks([session for _, session, _ in found if session.error is None], self._stuck)
        masks = {
            first + place: mask
            for first, session, _ in found
            if session.error is None  # otherwise its tokens are not used
            for place, mask in enumerate(session.words)
            if (mask != -1).any()
        }
        if not masks:
            return None
        self._staging.begin()
        index_A = self._staging.put(np.fromiter(masks, dtype=np.int64))
        allowed_AW = self._staging.put(np.stack([*masks.values()]))
        self._staging.copy()
        return index_A, allowed_AW

    def note(self, samples: HostSamples, tokens_S: torch.Tensor, watch: Stopwatch) -> dict[int, ErrorInfo]:
        """Note sampled tokens, which are on the host when `watch` is done. Return errors by index among the sampled chunks."""
        if self._sessions.keys().isdisjoint(samples.rows.tolist()):
            return {}
        sessions = [self._sessions.get(row) for _, row, _ in samples.per_row()]
        if any(session is not None and session.reads_tokens for session in sessions):
            self._pending.append((sessions, samples, tokens_S, watch))
        return {index: session.error for index, session in enumerate(sessions) if session is not None and session.error is not None}

    def _take(self, pending: Pending) -> None:
        sessions, samples, tokens_S, watch = pending
        watch.wait()
        tokens = tokens_S.tolist()
        for session, kept in zip(sessions, samples.kept(tokens), strict=True):
            if session is not None and session.error is None:
                session.waiting = [*session.waiting, *(tokens[index] for index in kept)]

    def _new_matcher(self, data: bytes) -> "GrammarMatcher":
        from xgrammar import GrammarMatcher

        return GrammarMatcher(self._compiled_of(data))

    def _read(self, data: bytes) -> "CompiledGrammar":
        from xgrammar import CompiledGrammar

        return CompiledGrammar.deserialize_json(data.decode(), vocabulary_of(self._folder))
