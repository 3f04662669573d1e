"""Masks of the next tokens that the rows' grammars and allowed-token lists permit.

The host receives a sampled token when its step is done. So rank 0 launches a step's forward pass, then waits for the tokens of the previous
step, passes them to the matchers and fills the masks while the device is busy. A step without grammars waits for nothing.
"""

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import repeat
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

NUM_CACHED = 64
INDEX_BYTES = 8
TOO_SLOW = ErrorInfo(400, "The grammar takes too long to evaluate.", code="invalid_grammar")
SLOW_S = 0.1  # thread time for one token of one row; tens of microseconds are usual


@dataclass(slots=True)
class Session:
    matcher: "GrammarMatcher"
    after: int | None  # the grammar applies after this token; None once it has been sampled
    is_over: bool = False  # the text is complete, or another rule made it violate the grammar
    is_slow: bool = False  # one token took longer than SLOW_S and delayed all rows: the grammar is no longer enforced

    @property
    def restricts(self) -> bool:
        return self.after is None and not self.is_over and not self.is_slow

    def take(self, token_id: int) -> None:
        if self.restricts:
            with self._watched():
                self.is_over = not self.matcher.accept_token(token_id) or self.matcher.is_terminated()
        elif token_id == self.after:
            self.after = None

    def look_ahead(self, proposed: Sequence[int]) -> Iterator[bool]:
        """Yield whether the grammar restricts the next token, then the one after each proposed token, assuming those before it, up to
        an impossible one. Masks may be filled during the iteration, which restores the state at its end."""
        after, is_over, num_taken = self.after, self.is_over, 0
        yield self.restricts
        for token in proposed:
            is_restricted = self.restricts
            self.take(token)
            if is_restricted and self.is_over and not self.matcher.is_terminated():
                break
            num_taken += is_restricted
            yield self.restricts
        if proposed:
            self.matcher.rollback(num_taken)
            self.after, self.is_over = after, is_over

    def fill(self, words: torch.Tensor, place: int) -> None:
        """Fill row `place` of a mask with the permitted next tokens."""
        with self._watched():
            self.matcher.fill_next_token_bitmask(words, place)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.is_slow = time.thread_time() - started > SLOW_S


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
            session = Session(GrammarMatcher(compiled), admit.grammar.after)
            for token_id in admit.output_ids:
                session.take(token_id)
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
        found = [(first, *self._limited[row], tokens) for first, row, tokens in samples.per_row() if row in self._limited]
        if any(session is not None for _, session, _, _ in found):
            proposing.wait()
            while self._pending:
                self._take(self._pending.popleft())
        limited: list[int] = []
        words = torch.full((sum(1 + len(tokens) for *_, tokens in found), self._num_words), -1, dtype=torch.int32)
        for first, session, allowed, proposed in found:
            restricted = repeat(False, 1 + len(proposed)) if session is None else session.look_ahead(proposed)
            for index, is_restricted in enumerate(restricted, first):
                if is_restricted and session is not None:
                    session.fill(words, len(limited))
                if allowed is not None:
                    words[len(limited)] &= torch.from_numpy(allowed)
                if is_restricted or allowed is not None:
                    limited.append(index)
        if not limited:
            return None
        self._staging.begin()
        index_A = self._staging.put(np.asarray(limited, dtype=np.int64))
        allowed_AW = self._staging.put(words[: len(limited)].numpy())
        self._staging.copy()
        return index_A, allowed_AW

    def note(self, samples: HostSamples, tokens_S: torch.Tensor, watch: Stopwatch) -> dict[int, ErrorInfo]:
        """Note sampled tokens, which are on the host when `watch` is done. Return errors by index among the sampled
        chunks, for each whose grammar was too slow and is no longer enforced."""
        if self._limited.keys().isdisjoint(samples.rows.tolist()):
            return {}
        sessions = [self._limited.get(row, (None, None))[0] for _, row, _ in samples.per_row()]
        if not any(sessions):
            return {}
        self._pending.append((sessions, samples, tokens_S, watch))
        return {index: TOO_SLOW for index, session in enumerate(sessions) if session is not None and session.is_slow}

    def _take(self, pending: Pending) -> None:
        sessions, samples, tokens_S, watch = pending
        watch.wait()
        tokens = tokens_S.tolist()
        for session, kept in zip(sessions, samples.kept(tokens), strict=True):
            if session is not None:
                for index in kept:
                    session.take(tokens[index])

    def _read(self, data: bytes) -> "CompiledGrammar":
        from xgrammar import CompiledGrammar

        self.load()
        assert self._vocabulary is not None
        return CompiledGrammar.deserialize_json(data.decode(), self._vocabulary)
