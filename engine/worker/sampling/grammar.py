"""Which tokens the grammars of rows, and their lists of allowed tokens, leave next.

The host learns a drawn token when its step is done. So rank 0 launches a step's forward pass, then waits for the tokens of the step before,
lets the matchers take them and fills the masks while the device is busy. A step without grammars waits for nothing.
"""

import contextlib
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.worker.sampling.draws import Int64s
from engine.worker.staging import ALIGNMENT, Staging
from engine.worker.stopwatch import Stopwatch
from models.attention.paged import Int32s

if TYPE_CHECKING:  # importing it takes seconds
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

NUM_CACHED = 64
INDEX_BYTES = 8
SLOW_S = 0.1  # of this thread's time for one token of one row; tens of microseconds are usual


@dataclass(slots=True)
class Session:
    """The matcher of one request."""

    matcher: "GrammarMatcher"
    after: int | None  # the grammar holds behind this token; None if it has come
    is_over: bool = False  # the text is complete, or another rule made it leave the grammar
    is_slow: bool = False  # a token took so long that all rows waited: it is followed no further

    @property
    def restricts(self) -> bool:
        return self.after is None and not self.is_over and not self.is_slow

    def take(self, token_id: int) -> None:
        """The request has drawn this token."""
        if self.restricts:
            with self._watched():
                self.is_over = not self.matcher.accept_token(token_id) or self.matcher.is_terminated()
        elif token_id == self.after:
            self.after = None

    def fill(self, words: torch.Tensor, place: int) -> None:
        """The tokens that may come next, into row `place` of a mask."""
        with self._watched():
            self.matcher.fill_next_token_bitmask(words, place)

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        started = time.thread_time()
        yield
        self.is_slow = time.thread_time() - started > SLOW_S


Drawn = tuple[list[Session | None], torch.Tensor, Stopwatch]  # tokens of a step that matchers have not taken
Mask = tuple[torch.Tensor, torch.Tensor]  # `index_A` and `allowed_AW` of `SamplingOps.mask_`


def bits_of(token_ids: Sequence[int], num_words: int) -> Int32s:
    """A mask of these tokens alone."""
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[np.asarray(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Grammars:
    """Grammars of all rows. `model_folder` has the tokenizer by which they were compiled."""

    def __init__(self, model_folder: Path, max_num_seqs: int, vocab_size: int, device: torch.device):
        self._folder = model_folder
        self._num_words = -(-vocab_size // 32)
        self._sessions: list[Session | None] = [None] * max_num_seqs
        self._allowed: list[Int32s | None] = [None] * max_num_seqs  # bits of the only tokens, as in a mask
        self._is_limited = [False] * max_num_seqs  # by the one or the other
        self._drawn: deque[Drawn] = deque()
        self._staging = Staging(max_num_seqs * (4 * self._num_words + INDEX_BYTES) + 2 * ALIGNMENT, device)
        self._vocabulary: TokenizerInfo | None = None
        self._compiled: OrderedDict[bytes, CompiledGrammar] = OrderedDict()
        self._loader = ThreadPoolExecutor(1, "grammars")

    def load(self) -> None:
        """What the first grammar would have to wait for."""
        from engine.grammar.vocabulary import read_vocabulary

        self._vocabulary = self._vocabulary or read_vocabulary(self._folder)

    def admit(self, row: int, data: bytes | None, after: int | None, output_ids: Sequence[int], allowed: Sequence[int] = ()) -> None:
        """Row `row` now belongs to a request with this compiled grammar, or none, which has drawn `output_ids` before a preemption and
        draws no other tokens than `allowed`, if there are some."""
        self._allowed[row] = bits_of(allowed, self._num_words) if allowed else None
        self._is_limited[row] = data is not None or bool(allowed)
        if data is None:
            self._sessions[row] = None
            return
        from xgrammar import GrammarMatcher

        session = self._sessions[row] = Session(GrammarMatcher(self._compiled_of(data)), after)
        for token_id in output_ids:
            session.take(token_id)

    def load_ahead(self, data: bytes, done: Callable[[], None]) -> None:
        """Reads a compiled grammar in a thread, which leaves the interpreter to others, then calls `done` there."""

        def load() -> None:
            try:
                self._compiled[data] = self._read(data)
            finally:
                done()

        self._loader.submit(load)

    def masks(self, rows: Int64s) -> Mask | None:
        """What these rows may draw now; None if anything. Waits for the tokens drawn before if a row has a grammar."""
        found = [(index, self._sessions[row], self._allowed[row]) for index, row in enumerate(rows.tolist()) if self._is_limited[row]]
        if not found:
            return None
        if any(session is not None for _, session, _ in found):
            while self._drawn:
                self._take(self._drawn.popleft())
        following = {index: session for index, session, _ in found if session is not None and session.restricts}
        limited = [(index, allowed) for index, _, allowed in found if index in following or allowed is not None]
        if not limited:
            return None
        words = torch.full((len(limited), self._num_words), -1, dtype=torch.int32)
        for place, (index, allowed) in enumerate(limited):
            if index in following:
                following[index].fill(words, place)
            if allowed is not None:
                words[place] &= torch.from_numpy(allowed)
        self._staging.begin()
        index_A = self._staging.put(np.asarray([index for index, _ in limited], dtype=np.int64))
        allowed_AW = self._staging.put(words.numpy())
        self._staging.copy()
        return index_A, allowed_AW

    def note(self, rows: Int64s, tokens_S: torch.Tensor, watch: Stopwatch) -> tuple[int, ...]:
        """These rows draw tokens, which are on the host when `watch` is done. Returns the draws whose grammar was too slow and is followed
        no further."""
        sessions = [self._sessions[row] for row in rows.tolist()]
        if not any(session is not None for session in sessions):
            return ()
        self._drawn.append((sessions, tokens_S, watch))
        return tuple(index for index, session in enumerate(sessions) if session is not None and session.is_slow)

    def _take(self, drawn: Drawn) -> None:
        sessions, tokens_S, watch = drawn
        watch.wait()
        for session, token_id in zip(sessions, tokens_S.tolist(), strict=True):
            if session is not None:
                session.take(token_id)

    def _compiled_of(self, data: bytes) -> "CompiledGrammar":
        """Many requests share few grammars."""
        if data not in self._compiled:
            self._compiled[data] = self._read(data)
        self._compiled.move_to_end(data)
        while len(self._compiled) > NUM_CACHED:
            self._compiled.popitem(last=False)
        return self._compiled[data]

    def _read(self, data: bytes) -> "CompiledGrammar":
        from xgrammar import CompiledGrammar

        self.load()
        assert self._vocabulary is not None
        return CompiledGrammar.deserialize_json(data.decode(), self._vocabulary)
