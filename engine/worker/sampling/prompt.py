"""Log-probabilities of a prompt's tokens: each token of a chunk predicts the next one. The head is applied to one slice at a time, since a
whole prompt's logits would be gigabytes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.wire.messages import Chunk, SamplingParams
from engine.wire.reports import PromptLogprobs, Report
from engine.worker.sampling.samples import Int64s
from models.kernels.paged import Int32s
from models.kernels.transfers import to_host

SLICE = 128  # tokens whose logits are held at once: 78 MB of a vocabulary of 150,000


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
