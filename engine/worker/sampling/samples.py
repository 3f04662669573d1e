"""Sampling parameters of a step's rows: looked up in a table on the host, staged with the rest of the step.

A sample's key depends only on the seed and the token's position, so a seed gives the same text whatever the row, the batch, the chunking or
a preemption.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.config import MIB
from engine.wire.params import PARAMETERS, PENALISING, SamplingParams
from engine.worker.sampling.verify import NONE, HostProposed, Proposed
from engine.worker.staging import Staging
from models.kernels.paged import Int32s
from models.kernels.sampling import INTEGERS, OFF, RowParams, SampleParams

Int64s = npt.NDArray[np.int64]

MIN_TEMPERATURE = 1e-5  # below it, Gumbel noise is negligible, and logits / temperature may overflow
MASK64 = 2**64 - 1
MAX_INT32 = 2**31 - 1
SEED_FACTOR, POSITION_FACTOR = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD1B54A32D192ED03)
MIX = (np.uint64(30), np.uint64(0xBF58476D1CE4E5B9)), (np.uint64(27), np.uint64(0x94D049BB133111EB))
LAST_SHIFT = np.uint64(31)

NUM_PARAMS, KEY, TOP_K = len(RowParams._fields), RowParams._fields.index("key"), RowParams._fields.index("top_k")
NUM_WORDS = NUM_PARAMS + 3
BYTES_PER_SAMPLE = 4 * NUM_PARAMS + 8 * 8  # upper bound for `HostSamples.stage`: also row, position, six indices and ids
PENALTIES, EDITS, WORDS = 1, 2, 4  # how a row changes its logits
# ENCODERS: conversion of a parameter's value for its kernel slot. NAMES: the parameter of each slot.
ENCODERS: dict[str, Callable[[float], float]] = {
    "inverse_temperature": lambda value: 1 / max(value, MIN_TEMPERATURE),
    "top_p": lambda value: value if value < 1 else OFF,
    "log_min_p": lambda value: np.log(value) if value > 0 else -np.inf,
    "top_k": lambda value: min(value, MAX_INT32),
}
NAMES = {parameter.slot: name for name, parameter in PARAMETERS.items()}


@dataclass(frozen=True, slots=True)
class Samples:
    """Samples of a step on the device: S of them, of which A change their logits first and L report log-probabilities."""

    rows_S: torch.Tensor  # int64, permanent rows
    params: SampleParams
    changes: int  # PENALTIES, EDITS and WORDS that any row needs
    changed_A: torch.Tensor  # int64 indices of samples
    positions_A: torch.Tensor  # int64, of the tokens to sample, in their sequences
    reported_L: torch.Tensor  # int64 indices of samples
    num_top: tuple[int, ...]  # L: number of log-probabilities in addition to the token's own
    proposed: Proposed | None  # None: one sample per row


@dataclass(frozen=True, slots=True)
class HostSamples:
    """Samples of a step on the host. Samples of one row are adjacent."""

    rows: Int64s  # (S,)
    positions: Int64s  # (S,)
    words: Int32s  # (NUM_WORDS, S), see `SampleTable`
    proposed: HostProposed | None = None

    def per_row(self) -> Iterator[tuple[int, int, Sequence[int]]]:
        if self.proposed is None:
            yield from zip(range(len(self.rows)), self.rows.tolist(), repeat(()), strict=False)
        else:
            firsts = self.proposed.counts.cumsum() - self.proposed.counts
            yield from zip(firsts.tolist(), self.rows[firsts].tolist(), self.proposed.rows, strict=True)

    def kept(self, tokens: Sequence[int]) -> Iterator[range]:
        return (range(i, i + 1) for i in range(len(tokens))) if self.proposed is None else self.proposed.kept(tokens)

    @classmethod
    def empty(cls) -> "HostSamples":
        return SampleTable(0, 0).samples(*np.zeros((2, 0), dtype=np.int64))

    def stage(self, staging: Staging) -> Samples:
        """Put the step's arrays into `staging`, to be copied later."""
        rows_S, words = staging.put(self.rows), staging.put(self.words[:NUM_PARAMS])
        named = zip(RowParams._fields, words, strict=True)
        row_params = RowParams(*(word if name in INTEGERS else word.view(torch.float32) for name, word in named))
        (is_wide, changes, num_logprobs), is_random = self.words[NUM_PARAMS:], self.words[0].any()
        wide = staging.put(is_wide.nonzero()[0]) if is_wide.any() else None
        largest = int(self.words[TOP_K].max(where=is_wide == 0, initial=0)) if is_random else 0
        params = SampleParams(row_params, wide, largest, not is_random)
        changed_A = positions_A = reported_L = rows_S[:0]
        num_top: tuple[int, ...] = ()
        if changes.any():
            changed = changes.nonzero()[0]
            changed_A, positions_A = staging.put(np.stack((changed, self.positions[changed])))
        if num_logprobs.any():
            reported = num_logprobs.nonzero()[0]
            reported_L, num_top = staging.put(reported), tuple((num_logprobs[reported] - 1).tolist())
        proposed = None if self.proposed is None else self.proposed.stage(staging)
        return Samples(rows_S, params, int(np.bitwise_or.reduce(changes)), changed_A, positions_A, reported_L, num_top, proposed)


class SampleTable:
    """Parameters of all rows. `max_top_k` is the backend's. A column: a row's `RowParams` without the key, whether it is wide, its changes,
    and the requested log-probabilities plus 1, or 0."""

    def __init__(self, max_num_seqs: int, max_top_k: int):
        self._max_top_k = max_top_k
        self._words = np.zeros((NUM_WORDS, max_num_seqs), dtype=np.int32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.uint64)

    def set(self, row: int, params: SamplingParams) -> None:
        """Set a row's parameters. A greedy row has no filter: sorting must not decide between equally likely tokens."""
        values = RowParams[Any](0.0, OFF, -np.inf, 0, 0)._asdict()
        if params.temperature > 0:
            values |= {slot: encode(getattr(params, NAMES[slot])) for slot, encode in ENCODERS.items()}
        is_wide = values["top_k"] > self._max_top_k or (values["top_k"] == 0 and (values["top_p"] != OFF or values["log_min_p"] != -np.inf))
        num_logprobs = 0 if params.logprobs is None else params.logprobs + 1
        bits = [np.asarray(value, np.int32 if name in INTEGERS else np.float32).view(np.int32) for name, value in values.items()]
        self._words[:, row] = *bits, is_wide, changes_of(params), num_logprobs
        self._seeds[row] = params.seed & MASK64

    def samples(self, rows: Int64s, positions: Int64s, proposed: HostProposed | None = None) -> HostSamples:
        """Return the inputs for sampling these rows' tokens at these positions of their sequences."""
        words = self._words[:, rows]
        words[KEY] = sample_keys(self._seeds[rows], positions)
        return HostSamples(rows, positions, words, proposed)


def samples_of(params: Sequence[SamplingParams], positions: Sequence[int], max_top_k: int, device: torch.device) -> Samples:
    """Return samples of rows 0, 1, ... with these parameters, one position each, without a worker. A single row may have more."""
    table, staging, rows = SampleTable(len(params), max_top_k), Staging(MIB, device), np.arange(len(params))
    for row, one in enumerate(params):
        table.set(row, one)
    staging.begin()
    proposed = HostProposed(((0,) * (len(positions) - 1),), np.full(len(positions), NONE)) if len(positions) > len(params) else None
    rows = rows if proposed is None else np.repeat(rows, proposed.counts)
    samples = table.samples(rows, np.asarray(positions), proposed).stage(staging)
    staging.copy()
    return samples


def changes_of(params: SamplingParams) -> int:
    penalises = any(getattr(params, name) != PARAMETERS[name].default for name in PENALISING)
    edits = bool(params.logit_bias) or params.min_tokens > 0 or any(len(word) == 1 for word in params.bad_words)
    return PENALTIES * penalises | EDITS * edits | WORDS * any(len(word) > 1 for word in params.bad_words)


def sample_keys(seeds: npt.NDArray[np.uint64], positions: Int64s) -> Int32s:
    """Return 32 bits per sample: splitmix64's finaliser over seed and position. Products wrap."""
    x = seeds * SEED_FACTOR + positions.astype(np.uint64) * POSITION_FACTOR
    for shift, factor in MIX:
        x = (x ^ (x >> shift)) * factor
    return (x ^ (x >> LAST_SHIFT)).astype(np.uint32).view(np.int32)
