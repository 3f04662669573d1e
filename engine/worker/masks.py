"""Masks of the next tokens that the rows' grammars and allowed-token lists permit.

The host receives a sampled token when its step is done. So rank 0 launches a step's forward pass, then waits for the tokens of the previous
step, passes them to the matchers and fills the masks while the device is busy. A step without grammars waits for nothing. Matchers, which
may take seconds for a token, run in a thread (xgrammar releases the interpreter lock). It is abandoned when its CPU time is used up.
"""

import functools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from engine.wire.arena import ArenaView
from engine.wire.grammar import GrammarLoaded, LoadGrammar
from engine.wire.ipc import Outbox
from engine.wire.messages import Admit, ErrorInfo, Region
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
STEP_S = 0.05  # for all rows of a step; afterwards each gets an equal share
MIN_SHARE_S = 0.002
POLL_S = 0.002
MAX_STUCK = 32  # abandoned threads that still run
LOWEST_PRIORITY = 19


@dataclass(slots=True, eq=False)
class Session:
    """Grammar of a row, and its masks in the current step: of the next token and of the token after each of the `proposed` ones."""

    matcher: "GrammarMatcher"
    after: int | None  # the grammar applies after this token; None once it has been sampled
    waiting: list[int]  # sampled tokens that the matcher has not accepted yet
    is_over: bool = False  # the text is complete, or another rule made it violate the grammar
    credit: float = CREDIT_S
    error: ErrorInfo | None = None  # ends the request; the grammar is no longer enforced
    proposed: Sequence[int] = ()
    words: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    places: list[int] = field(default_factory=list)  # restricted rows of `words`

    @property
    def restricts(self) -> bool:
        return self.after is None and not self.is_over

    @property
    def seconds(self) -> float:
        """Return the usual time of this step's work."""
        return TOKEN_S * (1 + len(self.waiting) + len(self.proposed))

    def take(self, token_id: int) -> None:
        if self.restricts:
            self.is_over = not self.matcher.accept_token(token_id) or self.matcher.is_terminated()
        elif token_id == self.after:
            self.after = None

    def fill(self) -> None:
        """Accept the waiting tokens, then fill the masks up to an impossible proposed token."""
        for token in self.waiting:
            self.take(token)
        after, is_over, num_taken = self.after, self.is_over, 0
        self.places = []
        for place in range(1 + len(self.proposed)):
            is_restricted = self.restricts
            if is_restricted:
                self.matcher.fill_next_token_bitmask(self.words, place)
                self.places.append(place)
            if place == len(self.proposed):
                break
            self.take(self.proposed[place])
            if is_restricted and self.is_over and not self.matcher.is_terminated():
                break
            num_taken += is_restricted
        if self.proposed:
            self.matcher.rollback(num_taken)
            self.after, self.is_over = after, is_over

    def charge(self, seconds: float) -> None:
        """Account for the step's work."""
        self.credit = min(CREDIT_S, self.credit + self.seconds - seconds)
        self.waiting.clear()
        if self.credit < 0:
            self.error = TOO_SLOW


class MaskThread(threading.Thread):
    """Fills the masks of a step's sessions. `lock` guards the progress."""

    def __init__(self) -> None:
        super().__init__(name="masks", daemon=True)
        self.lock, self.done = threading.Lock(), threading.Event()
        self.is_abandoned = False
        self.left: deque[Session] = deque()  # the first one is in work
        self.spent = self.started = 0.0  # CPU time in this step; of this thread when the current session began
        self._may_begin = threading.Semaphore(0)

    def begin(self, sessions: Sequence[Session], spent: float) -> None:
        self.left, self.spent, self.started = deque(sessions), spent, self.cpu_time()
        self.done.clear()
        self._may_begin.release()

    def cpu_time(self) -> float:
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident or 0))

    def abandon_if_late(self, share: float) -> None:
        """Abandon the thread if the current session has used its credit, or the step's time and its share."""
        with self.lock:
            late = self.cpu_time() - self.started
            if self.left and late > self.left[0].seconds + min(self.left[0].credit, max(share, STEP_S - self.spent)):
                self.is_abandoned = True

    def run(self) -> None:
        while self._may_begin.acquire():
            while self.left:
                try:
                    self.left[0].fill()
                except RuntimeError:
                    logger.exception("a grammar could not be evaluated")
                    self.left[0].error = BROKEN
                with self.lock:
                    if self.is_abandoned:
                        return
                    now = self.cpu_time()
                    self.left.popleft().charge(now - self.started)
                    self.spent, self.started = self.spent + now - self.started, now
            self.done.set()


class MaskFiller:
    """Fills masks within the time of a step, whatever the grammars are."""

    def __init__(self) -> None:
        self._thread: MaskThread | None = None
        self._stuck: list[MaskThread] = []

    def fill(self, sessions: Sequence[Session]) -> None:
        """Fill the sessions' masks, or set their errors."""
        share, spent = max(MIN_SHARE_S, STEP_S / max(1, len(sessions))), 0.0
        while sessions:
            if self._thread is None:
                self._stuck = [thread for thread in self._stuck if thread.is_alive()]
                if len(self._stuck) >= MAX_STUCK:
                    for session in sessions:
                        session.error = BUSY
                    return
                self._thread = MaskThread()
                self._thread.start()
            thread, self._thread = self._thread, None
            thread.begin(sessions, spent)
            while not thread.is_abandoned and not thread.done.wait(POLL_S):
                assert thread.is_alive(), "the thread of the masks has ended"
                thread.abandon_if_late(share)
            if not thread.is_abandoned:
                self._thread = thread
                return
            os.setpriority(os.PRIO_PROCESS, thread.native_id or 0, LOWEST_PRIORITY)
            self._stuck.append(thread)
            stuck, *sessions = thread.left
            stuck.error, spent = TOO_SLOW, STEP_S


Pending = tuple[list[Session | None], HostSamples, torch.Tensor, Stopwatch]  # tokens of a step that matchers have not accepted yet
Mask = tuple[torch.Tensor, torch.Tensor]  # `index_A` and `allowed_AW` of `SamplingOps.mask_`


def bits_of(token_ids: Sequence[int], num_words: int) -> Int32s:
    """Return a mask of only these tokens."""
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[np.asarray(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _bytes_of(region: Region, arena: ArenaView) -> bytes:
    return bytes(arena.view(region.offset, region.length))


class TokenRules:
    """Grammars and allowed tokens of all rows, for steps of up to `max_samples`. `model_folder` has the tokenizer of their compilation."""

    def __init__(self, model_folder: Path, max_samples: int, vocab_size: int, device: torch.device):
        self._folder = model_folder
        self._num_words = -(-vocab_size // 32)
        self._limited: dict[int, tuple[Session | None, Int32s | None]] = {}  # rows: grammar, and mask of the allowed tokens
        self._pending: deque[Pending] = deque()
        self._staging = Staging(max_samples * (4 * self._num_words + INDEX_BYTES) + 2 * ALIGNMENT, device)
        self._filler = MaskFiller()
        self._vocabulary: TokenizerInfo | None = None
        self._compiled_of = functools.lru_cache(NUM_CACHED)(self._read)  # many requests share few; any thread may call it
        self._loader = ThreadPoolExecutor(1, "grammars")

    def load(self) -> None:
        """Load the libraries and the vocabulary that the first grammar needs."""
        from engine.grammar.vocabulary import read_vocabulary

        self._vocabulary = self._vocabulary or read_vocabulary(self._folder)

    def admit(self, admit: Admit, arena: ArenaView | None) -> None:
        """Assign the row to a request. Grammars are read from `arena`; None on ranks that do not sample."""
        self._limited.pop(admit.row, None)
        session, allowed = None, admit.params.allowed_token_ids
        if admit.grammar is not None and arena is not None:
            from xgrammar import GrammarMatcher

            compiled = self._compiled_of(_bytes_of(admit.grammar.region, arena))
            session = Session(GrammarMatcher(compiled), admit.grammar.after, list(admit.output_ids))
        if session is not None or allowed:
            self._limited[admit.row] = session, bits_of(allowed, self._num_words) if allowed else None

    def handlers(self, arena: ArenaView, processor: Outbox[GrammarLoaded]) -> dict[type, Callable[[Any], object]]:
        """Return the handlers of the processor's messages; see `Runner.handlers`."""
        return {LoadGrammar: functools.partial(self.prefetch, arena=arena, processor=processor)}

    def prefetch(self, message: LoadGrammar, arena: ArenaView, processor: Outbox[GrammarLoaded]) -> None:
        """Read a grammar that a plan may name later, in a thread that releases the interpreter lock and answers `processor`."""
        data = _bytes_of(message.region, arena)

        def load() -> None:
            try:
                self._compiled_of(data)
            finally:
                processor.send(GrammarLoaded(message.ticket))

        self._loader.submit(load)

    def masks(self, samples: HostSamples, proposing: Stopwatch) -> Mask | None:
        """Return the masks of permitted tokens; None if all are permitted. Waits for the previous tokens, and for proposed ones, which are
        on the host when `proposing` is done, if a row has a grammar."""
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
        self._filler.fill(sessions)
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
        """Note sampled tokens, which are on the host when `watch` is done. Return errors by index among the sampled chunks, for each whose
        grammar is no longer enforced."""
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

    def _read(self, data: bytes) -> "CompiledGrammar":
        from xgrammar import CompiledGrammar

        self.load()
        assert self._vocabulary is not None
        return CompiledGrammar.deserialize_json(data.decode(), self._vocabulary)
