"""Outputs of pooling requests: the last hidden state of a prompt, or its logits of a few tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.kernels.transfers import to_host


@dataclass(frozen=True, slots=True)
class PooledRow:
    """Chunk that ends a prompt: its index in the plan, the index of its sample, and the ids of `SamplingParams.pooled_ids`."""

    chunk: int
    sample: int
    ids: tuple[int, ...]


def reads_logits(rows: Sequence[PooledRow], num_samples: int) -> bool:
    """Return whether any sample of a step needs logits: a pooled row's sampled token is never read."""
    return len(rows) < num_samples or any(row.ids for row in rows)


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
