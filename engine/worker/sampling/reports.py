"""Reports of a step's rows in addition to samples: pooled numbers, and log-probabilities of prompts, where each token of a chunk predicts
the next one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.wire.messages import Chunk, SamplingParams
from engine.wire.reports import Numbers, PromptLogprobs, Report
from engine.worker.sampling.samples import Int64s
from engine.worker.staging import Staging
from models.kernels.paged import Int32s
from models.kernels.transfers import to_host

SLICE = 128  # tokens of a prompt whose logits are held at once: 78 MB of a vocabulary of 150,000


class ReportingRow(Protocol):
    params: SamplingParams

    @property
    def prompt_ids(self) -> Int32s: ...


@dataclass(frozen=True, slots=True)
class ScoredChunk:
    chunk: int  # index in the plan
    start: int
    num_top: int
    tokens: Int64s  # (N,) indices in the step, ascending
    targets: Int64s  # (N,) ids that follow them

    @classmethod
    def of(cls, index: int, chunk: Chunk, first: int, row: ReportingRow) -> "ScoredChunk | None":
        """Return the part of a chunk, whose first token is the step's `first`, that predicts tokens of the prompt; None if it is empty or
        was not requested."""
        num_top = row.params.prompt_logprobs
        if num_top is None:
            return None
        targets = row.prompt_ids[chunk.start + 1 : chunk.start + chunk.length + 1].astype(np.int64)
        return cls(index, chunk.start + 1, num_top, first + np.arange(len(targets)), targets) if len(targets) else None


@dataclass(frozen=True, slots=True)
class PromptScores:
    """(N,) log-probabilities, and (N, M) most likely tokens with theirs, on the host when the step is done."""

    chunks: Sequence[ScoredChunk]
    logprobs_N: torch.Tensor
    top_ids_NM: torch.Tensor
    top_NM: torch.Tensor

    def per_chunk(self) -> dict[int, Report]:
        """Return scores by chunk index in the plan. The copies must have reached the host."""
        found: dict[int, Report] = {}
        first = 0
        for chunk in self.chunks:
            rows = slice(first, first + len(chunk.targets))
            top_ids, top = (values[rows, : chunk.num_top].contiguous().numpy() for values in (self.top_ids_NM, self.top_NM))
            logprobs = self.logprobs_N[rows].numpy().tobytes()
            found[chunk.chunk] = PromptLogprobs(chunk.start, chunk.num_top, logprobs, top_ids.tobytes(), top.tobytes())
            first = rows.stop
        return found


def score_prompts(
    hidden_SD: torch.Tensor, chunks: Sequence[ScoredChunk], scored_2N: torch.Tensor, head: Callable[[torch.Tensor], torch.Tensor]
) -> PromptScores:
    """Score prompts. `scored_2N`: indices of the chunks' hidden states, and next tokens; `head` maps hidden states to (n, V) float32
    logits."""
    num_top = max(chunk.num_top for chunk in chunks)
    parts = []
    for rows, targets in scored_2N.split(SLICE, dim=1):
        logits = head(hidden_SD[rows])
        norm = logits.logsumexp(dim=-1, keepdim=True)
        top, top_ids = logits.topk(num_top, dim=-1)
        parts.append((logits.gather(-1, targets[:, None])[:, 0] - norm[:, 0], top_ids.int(), top - norm))
    return PromptScores(chunks, *(to_host(torch.cat(values)) for values in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True)
class PooledRow:
    """Chunk that ends a prompt: its index in the plan, the index of its sample, and the ids of `SamplingParams.pooled_ids`."""

    chunk: int
    sample: int
    ids: tuple[int, ...]


def pool(rows: Sequence[PooledRow], hidden_SD: torch.Tensor, logits_SV: torch.Tensor | None) -> dict[int, torch.Tensor]:
    """Return pooled outputs by chunk index, float32, on the host when the step is done."""
    found = {}
    for row in rows:
        values = hidden_SD[row.sample]
        if row.ids:
            assert logits_SV is not None
            values = logits_SV[row.sample, list(row.ids)]
        found[row.chunk] = to_host(values.float())
    return found


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
        has_logits = len(self.pooled) < len(hidden_SD) or any(row.ids for row in self.pooled)  # a pooled row's sample is never read
        logits_SV = head(hidden_SD) if has_logits else None
        return logits_SV, self.read_samples(hidden_SD, logits_SV, scores)

    def read_samples(self, hidden_SD: torch.Tensor, logits_SV: torch.Tensor | None, scores: PromptScores | None = None) -> Readings:
        return Readings(pool(self.pooled, hidden_SD, logits_SV), scores) if self.pooled or scores else NOTHING_READ


NO_REPORTS = StepReports()
