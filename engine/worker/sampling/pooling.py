"""What a request wants instead of tokens: the last hidden state of its prompt, or the logits of a few tokens there."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.kernels.transfers import to_host


@dataclass(frozen=True, slots=True)
class PooledRow:
    """A chunk that ends a prompt: its index in the plan, which of the step's draws it is, and the ids of `SamplingParams.pooled_ids`."""

    chunk: int
    draw: int
    ids: tuple[int, ...]


def reads_logits(rows: Sequence[PooledRow], num_draws: int) -> bool:
    """Whether any of a step's draws needs logits: the token of a pooled row is drawn, but nothing reads it."""
    return len(rows) < num_draws or any(row.ids for row in rows)


def pool(rows: Sequence[PooledRow], hidden_SD: torch.Tensor, logits_SV: torch.Tensor) -> dict[int, torch.Tensor]:
    """By the index of the chunk, float32 on the host when the step is done."""
    values = (logits_SV[row.draw, list(row.ids)] if row.ids else hidden_SD[row.draw] for row in rows)
    return {row.chunk: to_host(value.float()) for row, value in zip(rows, values, strict=True)}
