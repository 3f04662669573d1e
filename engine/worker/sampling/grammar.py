"""Which tokens the grammars of rows, and their lists of allowed tokens, leave next.

Rank 0 launches the forward pass of a step, then waits for the tokens of the step before, lets the matchers take them and fills the masks,
while the device is busy; sampling follows. A step without grammars waits for nothing.
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
import numpy.typing as npt
import torch

from engine.worker.staging import ALIGNMENT, Staging
from engine.worker.stopwatch import Marks

if TYPE_CHECKING:  # importing it takes seconds, which only those wait for who use it
    from xgrammar import CompiledGrammar, GrammarMatcher, TokenizerInfo

Int32s = npt.NDArray[np.int32]

NUM_CACHED = 64
INDEX_BYTES = 8
SLOW_S = 0.1  # of this thread's time for one token of one row; usual are some tens of microseconds


@dataclass(slots=True)
class Session:

    matcher: "GrammarMatcher"
    after: int | None  # the grammar holds behind this token; None if it has come
    is_over: bool = False  # the text is complete, or a stop token or another rule was stronger
    is_slow: bool = False  # a token held all other rows up: it is followed no further

    @property
    def restricts(self) -> bool:
        return self.after is None and not self.is_over and not self.is_slow

    def take(self, token_id: int) -> None:
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


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that matchers have not taken: on the host when `marks` are done."""

    sessions: Sequence[Session | None]
    tokens_S: torch.Tensor
    marks: Marks


@dataclass(frozen=True, slots=True)
class Mask:
    """See `SamplingOps.mask_`."""

    index_A: torch.Tensor
    allowed_AW: torch.Tensor


def bits_of(token_ids: Sequence[int], num_words: int) -> Int32s:
    """A mask that allows these tokens."""
    bits = np.zeros(32 * num_words, dtype=np.uint8)
    bits[np.asarray(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


class Grammars:
    """Of all rows. `model_folder` has the tokenizer by which they were compiled."""

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
        """Before the first grammar: it takes seconds."""
        from engine.grammar.vocabulary import read_vocabulary

        self._vocabulary = self._vocabulary or read_vocabulary(self._folder)

    def admit(self, row: int, data: bytes | None, after: int | None, output_ids: Sequence[int], allowed: Sequence[int] = ()) -> None:
        """A new request in this row, with a compiled grammar or none. It drew `output_ids` before a preemption, and draws only `allowed`
        tokens, if there are some."""
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
        """Reads a compiled grammar in a thread, and then calls `done` there."""

        def load() -> None:
            try:
                self._compiled[data] = self._read(data)
            finally:
                done()

        self._loader.submit(load)

    def masks(self, rows: npt.NDArray[np.int64]) -> Mask | None:
        """What these rows may draw; None for anything. Waits for the tokens drawn before if a row has a grammar."""
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
        return Mask(index_A, allowed_AW)

    def note(self, rows: npt.NDArray[np.int64], tokens_S: torch.Tensor, marks: Marks) -> tuple[int, ...]:
        """These rows draw tokens, on the host when `marks` are done. Returns which draws follow a grammar no further: it is too slow."""
        sessions = [self._sessions[row] for row in rows.tolist()]
        if not any(session is not None for session in sessions):
            return ()
        self._drawn.append(Drawn(sessions, tokens_S, marks))
        return tuple(index for index, session in enumerate(sessions) if session is not None and session.is_slow)

    def _take(self, drawn: Drawn) -> None:
        drawn.marks.wait()
        for session, token_id in zip(drawn.sessions, drawn.tokens_S.tolist(), strict=True):
            if session is not None:
                session.take(token_id)

    def _compiled_of(self, data: bytes) -> "CompiledGrammar":
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
