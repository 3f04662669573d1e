"""How the rows of a step draw their tokens: what the worker's sampler asks of a backend. Both backends give the same tokens.

A row's score is its logit over the temperature. Filters keep the best tokens in the order (logit descending, id ascending): the `top_k`
first; of these the first whose probabilities reach `top_p` together, renormalised, the one that crosses it included; of these the ones
not less probable than `min_p` times the best, which always stays. The token is the one whose score plus Gumbel noise is the largest, the
lowest id if there are several; it has the probability that softmax gives it among those kept.

The noise is a function of the row's key and the token id. Probabilities are summed as integers, so neither the order of a sum nor what
else is in a step decides what `top_p` keeps.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

MASS_BITS = 40  # a token's probability over the best one's, as an integer: the sum over a vocabulary fits into 63 bits
OFF = 2.0  # a `top_p` that keeps everything


@dataclass(frozen=True, slots=True)
class DrawParams:
    """S rows, all tensors (S,) on the device."""

    inverse_temperature: torch.Tensor  # float32; 0 for a greedy row, whose other parameters are off
    top_p: torch.Tensor  # float32; OFF
    log_min_p: torch.Tensor  # float32; minus infinity where off
    top_k: torch.Tensor  # int32; 0 where off
    key: torch.Tensor  # int32: 32 random bits of this draw
    wide: torch.Tensor | None  # int64 (W,): rows with a filter that are not drawn by top-k up to `Draw.max_top_k` first; None if there are none
    largest_top_k: int  # of the other rows
    is_greedy: bool  # all rows are


class Draw(Protocol):
    """A backend's way to draw."""

    max_top_k: int  # the largest that needs no sorted vocabulary

    def __call__(self, logits_SV: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """(S,) int64 token ids, always within the vocabulary."""
