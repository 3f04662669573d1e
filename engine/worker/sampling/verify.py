"""Verification of proposed tokens. A row with k of them samples k + 1 tokens in one step: after its last token and after each of
them. The first is kept, and each further one as long as all samples before it equal the proposed tokens.

A sample depends only on the tokens before it and on its position (`samples.py`), so the kept tokens equal those of single steps.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.messages import MAX_PROPOSED
from engine.worker.staging import Staging

NONE = -1  # no token


@dataclass(frozen=True, slots=True)
class Proposed:
    """Proposed tokens of a step with S samples. `next_S`: the one after each sample, NONE after a row's last (before `Rows.look_up`, their
    indices); `offsets_S`: the number of the row's proposed tokens before it; `firsts_S`: the index of the row's first sample."""

    next_S: torch.Tensor  # int64
    offsets_S: torch.Tensor  # int64
    firsts_S: torch.Tensor  # int64

    def keep(self, tokens_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two bool (S,): the kept samples, and the last kept sample of each row."""
        is_miss = tokens_S != self.next_S
        before = is_miss.cumsum(0) - is_miss.long()
        is_kept = before == before[self.firsts_S]
        return is_kept, is_kept & is_miss

    def before(self, index_A: torch.Tensor) -> torch.Tensor:
        """Return (A, MAX_PROPOSED) proposed tokens before these samples, right-aligned and padded with NONE."""
        distance = torch.arange(MAX_PROPOSED, 0, -1, device=index_A.device)
        found = self.next_S[(index_A[:, None] - distance).clamp(min=0)]
        return torch.where(distance <= self.offsets_S[index_A][:, None], found, NONE)


@dataclass(frozen=True, slots=True)
class HostProposed:
    """Proposed tokens on the host, by row. `next_S`: the index of the one after each sample in the table of `Rows`, NONE after a row's
    last."""

    rows: tuple[Sequence[int], ...]
    next_S: npt.NDArray[np.int64]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return np.asarray([1 + len(tokens) for tokens in self.rows], dtype=np.int64)

    def stage(self, staging: Staging) -> Proposed:
        """Put the arrays into `staging`, to be copied later."""
        counts = self.counts
        firsts = np.repeat(counts.cumsum() - counts, counts)
        return Proposed(*staging.put(np.stack((self.next_S, np.arange(len(firsts)) - firsts, firsts))))

    def kept(self, tokens: Sequence[int]) -> Iterator[range]:
        """Yield the indices of each row's kept samples; the tokens of the others are NONE."""
        first = 0
        for count in self.counts.tolist():
            yield range(first, first + count - tokens[first : first + count].count(NONE))
            first += count
