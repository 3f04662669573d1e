"""Reports of a step's rows in addition to samples: pooled numbers, and log-probabilities of prompts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.wire.messages import Chunk
from engine.wire.reports import Numbers, Report
from engine.worker.sampling.pooling import PooledRow, pool, reads_logits
from engine.worker.sampling.prompt import PromptScores, ReportingRow, ScoredChunk, score_prompts
from engine.worker.sampling.samples import Int64s
from engine.worker.staging import Staging


@dataclass(frozen=True, slots=True)
class Readings:
    pooled: dict[int, torch.Tensor]
    scores: PromptScores | None = None

    def by_chunk(self) -> dict[int, Report]:
        reports: dict[int, Report] = {chunk: Numbers(values.numpy().tobytes()) for chunk, values in self.pooled.items()}
        return reports if self.scores is None else reports | self.scores.per_chunk()


NOTHING_READ = Readings({})


@dataclass(frozen=True, slots=True)
class StepReports:
    scored: tuple[ScoredChunk, ...] = ()
    pooled: tuple[PooledRow, ...] = ()

    @classmethod
    def of(cls, chunks: Sequence[Chunk], num_prefills: int, rows: Mapping[int, ReportingRow]) -> "StepReports":
        """Return the reports of a plan's chunks, whose first `num_prefills` compute prompts."""
        scored, pooled = list[ScoredChunk | None](), list[PooledRow]()
        first, sample = 0, 0
        for index, chunk in enumerate(chunks):
            row = rows[chunk.row]
            if index < num_prefills:
                scored.append(ScoredChunk.of(index, chunk, first, row))
            if chunk.sample and row.params.pooled_ids is not None:
                pooled.append(PooledRow(index, sample, row.params.pooled_ids))
            sample += chunk.num_samples
            first += chunk.length
        return cls(tuple(one for one in scored if one is not None), tuple(pooled))

    @property
    def tokens(self) -> list[Int64s]:
        """Return the indices of the step's tokens that are read in addition to those that sample."""
        return [chunk.tokens for chunk in self.scored]

    def stage(self, wanted: Int64s, staging: Staging) -> torch.Tensor | None:
        """Stage the indices of the hidden states of `tokens`, and their next tokens: int64 (2, N). `wanted` are the ascending step tokens
        with hidden states."""
        if not self.scored:
            return None
        tokens, targets = np.concatenate(self.tokens), np.concatenate([chunk.targets for chunk in self.scored])
        return staging.put(np.stack((np.searchsorted(wanted, tokens), targets)))

    def read(
        self, hidden_SD: torch.Tensor, indices_S: torch.Tensor, scored_2N: torch.Tensor | None, head: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor | None, Readings]:
        """Return the logits of the samples, None if nothing reads them, and the reports. `indices_S`: indices of the samples' hidden
        states."""
        scores = None
        if scored_2N is not None:
            scores = score_prompts(hidden_SD, self.scored, scored_2N, head)
            hidden_SD = hidden_SD[indices_S]
        logits_SV = head(hidden_SD) if reads_logits(self.pooled, len(hidden_SD)) else None
        return logits_SV, self.read_samples(hidden_SD, logits_SV, scores)

    def read_samples(self, hidden_SD: torch.Tensor, logits_SV: torch.Tensor | None, scores: PromptScores | None = None) -> Readings:
        return Readings(pool(self.pooled, hidden_SD, logits_SV), scores) if self.pooled or scores else NOTHING_READ


NO_REPORTS = StepReports()
