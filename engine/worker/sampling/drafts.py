"""Guesses of what rows draw next, verified. A row with k drafts draws k + 1 tokens in one step: behind its last token and behind each
draft. Of these it keeps the first, and each further one as long as all draws before it are the drafts.

A draw depends on what is before it and on its position alone (`draws.py`), so what is kept is what single steps would have drawn.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.wire.messages import MAX_DRAFTS
from engine.worker.staging import Staging

NONE = -1  # where there is no draft


@dataclass(frozen=True, slots=True)
class Drafts:
    """Of S draws: the draft that stands behind each one's place, or NONE behind a row's last; the number of its row's drafts before it; the
    row's first draw."""

    next_S: torch.Tensor  # int64
    offsets_S: torch.Tensor  # int64
    firsts_S: torch.Tensor  # int64

    def keep(self, tokens_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of these draws count, and which of them are their row's last: bool (S,), one of the latter a row."""
        is_miss = tokens_S != self.next_S
        before = is_miss.cumsum(0) - is_miss.long()
        is_kept = before == before[self.firsts_S]
        return is_kept, is_kept & is_miss

    def before(self, index_A: torch.Tensor) -> torch.Tensor:
        """(A, MAX_DRAFTS): the drafts before these draws, the last one at the end, NONE in front."""
        distance = torch.arange(MAX_DRAFTS, 0, -1, device=index_A.device)
        found = self.next_S[(index_A[:, None] - distance).clamp(min=0)]
        return torch.where(distance <= self.offsets_S[index_A][:, None], found, NONE)


@dataclass(frozen=True, slots=True)
class HostDrafts:
    """The same on the host, by row."""

    rows: tuple[tuple[int, ...], ...]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Draws of each row."""
        return np.asarray([1 + len(drafts) for drafts in self.rows], dtype=np.int64)

    def stage(self, staging: Staging) -> Drafts:
        """Puts them into `staging`, whose `copy` comes later."""
        following = [token for drafts in self.rows for token in (*drafts, NONE)]
        counts = self.counts
        firsts = np.repeat(counts.cumsum() - counts, counts)
        return Drafts(*staging.put(np.stack((following, np.arange(len(firsts)) - firsts, firsts))))

    def kept(self, tokens: Sequence[int]) -> Iterator[range]:
        """Of each row, which of these draws count."""
        first = 0
        for drafts in self.rows:
            count = next((i for i, draft in enumerate(drafts) if tokens[first + i] != draft), len(drafts))
            yield range(first, first + count + 1)
            first += 1 + len(drafts)
