"""What the rows of a step need of the sampler: looked up in a table on the host, staged with the rest of the step.

Used by the worker's rows and graphs. The key of a draw depends on the seed and the token's position only, so a seed gives the same text
whatever the row, the batch, the chunking or a preemption.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.messages import SamplingParams
from engine.worker.staging import Staging
from models.sampling import OFF, DrawParams

Int64s = npt.NDArray[np.int64]

MIN_TEMPERATURE = 1e-5  # below it the noise is lost beside the logits anyway, and their quotient may overflow
MASK64 = 2**64 - 1
NO_LOGPROBS = -1

PENALTIES, EDITS, WORDS = 1, 2, 4  # what a row does to its logits


@dataclass(frozen=True, slots=True)
class Draws:
    """A step's draws on the device: S of them, of which A change their logits first and L report log-probabilities."""

    rows_S: torch.Tensor  # int64, permanent rows that receive the tokens
    params: DrawParams
    changes: int  # PENALTIES, EDITS and WORDS, whatever a row of the step needs
    changed_A: torch.Tensor  # int64 indices of draws
    positions_A: torch.Tensor  # int64, of the tokens to draw, in their sequences
    reported_L: torch.Tensor  # int64 indices of draws
    num_top: int  # most log-probabilities that a row wants beside that of its token

    @property
    def num_rows(self) -> int:
        return self.rows_S.shape[0]


@dataclass(frozen=True, slots=True)
class HostDraws:
    """The same on the host."""

    rows: Int64s
    positions: Int64s
    floats: npt.NDArray[np.float32]  # (3, S): 1 / temperature, top_p, log(min_p)
    ints: npt.NDArray[np.int32]  # (2, S): top_k, key
    wide: Int64s
    largest_top_k: int
    changes: npt.NDArray[np.uint8]  # (S,)
    num_logprobs: npt.NDArray[np.int32]  # (S,)

    @classmethod
    def empty(cls) -> "HostDraws":
        """No draws."""
        return DrawTable(0, 0).draws(*np.zeros((2, 0), dtype=np.int64))

    def stage(self, staging: Staging) -> Draws:
        """Puts what the step needs into `staging`, whose `copy` comes later."""
        rows_S = staging.put(self.rows)
        (inverse_temperature, top_p, log_min_p), (top_k, key) = staging.put(self.floats), staging.put(self.ints)
        wide = staging.put(self.wide) if len(self.wide) else None
        is_greedy = not self.floats[0].any()
        params = DrawParams(inverse_temperature, top_p, log_min_p, top_k, key, wide, self.largest_top_k, is_greedy)
        changed_A = positions_A = reported_L = rows_S[:0]
        changes = int(np.bitwise_or.reduce(self.changes, initial=0))
        if changes:
            changed = self.changes.nonzero()[0]
            changed_A, positions_A = staging.put(np.stack((changed, self.positions[changed])))
        num_top = int(self.num_logprobs.max(initial=NO_LOGPROBS))
        if num_top != NO_LOGPROBS:
            reported_L = staging.put((self.num_logprobs != NO_LOGPROBS).nonzero()[0])
        return Draws(rows_S, params, changes, changed_A, positions_A, reported_L, num_top)


class DrawTable:
    """Parameters of all rows. `max_top_k` is the backend's."""

    def __init__(self, max_num_seqs: int, max_top_k: int):
        self._max_top_k = max_top_k
        self._floats = np.zeros((3, max_num_seqs), dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._is_wide = np.zeros(max_num_seqs, dtype=bool)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self._changes = np.zeros(max_num_seqs, dtype=np.uint8)
        self._num_logprobs = np.zeros(max_num_seqs, dtype=np.int32)

    def set(self, row: int, params: SamplingParams) -> None:
        """The row now draws like this. A greedy row has no filter: which of its best tokens comes first, no sorting may decide."""
        is_random = params.temperature > 0
        inverse = 1 / max(params.temperature, MIN_TEMPERATURE) if is_random else 0.0
        top_p = params.top_p if is_random and params.top_p < 1 else OFF
        min_p = params.min_p if is_random else 0.0
        top_k = params.top_k if is_random else 0
        self._floats[:, row] = inverse, top_p, np.log(min_p) if min_p > 0 else -np.inf
        self._top_k[row] = min(top_k, np.iinfo(np.int32).max)
        self._is_wide[row] = top_k > self._max_top_k or (top_k == 0 and (top_p < 1 or min_p > 0))
        self._seeds[row] = params.seed & MASK64
        self._changes[row] = changes_of(params)
        self._num_logprobs[row] = NO_LOGPROBS if params.logprobs is None else params.logprobs

    def draws(self, rows: Int64s, positions: Int64s) -> HostDraws:
        """What these rows need to draw the tokens at these positions of their sequences."""
        top_k, is_wide = self._top_k[rows], self._is_wide[rows]
        return HostDraws(
            rows=rows,
            positions=positions,
            floats=self._floats[:, rows],
            ints=np.stack((top_k, draw_keys(self._seeds[rows], positions))),
            wide=is_wide.nonzero()[0],
            largest_top_k=int(top_k.max(initial=0, where=~is_wide)),
            changes=self._changes[rows],
            num_logprobs=self._num_logprobs[rows],
        )


def changes_of(params: SamplingParams) -> int:
    """Which changes of logits a request asks for."""
    penalises = params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1
    edits = bool(params.logit_bias) or params.min_tokens > 0 or any(len(word) == 1 for word in params.bad_words)
    return PENALTIES * penalises | EDITS * edits | WORDS * any(len(word) > 1 for word in params.bad_words)


def draw_keys(seeds: npt.NDArray[np.uint64], positions: Int64s) -> npt.NDArray[np.int32]:
    """32 bits for each draw: splitmix64's finaliser over seed and position. Products wrap."""
    x = seeds * np.uint64(0x9E3779B97F4A7C15) + positions.astype(np.uint64) * np.uint64(0xD1B54A32D192ED03)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (x ^ (x >> np.uint64(31))).astype(np.uint32).view(np.int32)
