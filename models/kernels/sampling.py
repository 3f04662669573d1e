"""Sampling of a step's rows. All backends give the same tokens.

A token's score is its logit divided by the temperature. Filters keep the best tokens in the order (logit descending, id ascending): the
first `top_k`; of these the first whose renormalised probabilities reach `top_p`, including the one that crosses it; of these the ones with
at least `min_p` times the best probability. The sample has the largest score plus Gumbel noise; ties go to the lowest id.

The noise is a function of the row's key and the token id. Probabilities are summed as integers, so the result does not depend on the order.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

MASS_BITS = 40  # fixed-point scale of a probability relative to the best: sums over a vocabulary fit into 63 bits
OFF = 2.0  # a `top_p` that keeps everything
IN_PROMPT = 1 << 30  # flag added to the count of a token in the prompt
INTEGERS = ("top_k", "key")  # of `RowParams`: int32, the others are float32
T = TypeVar("T")


class RowParams(NamedTuple, Generic[T]):
    """Sampling parameters of a row, or tensors (S,) for S rows: four bytes per value, in the order of the kernels' arguments."""

    inverse_temperature: T  # 0 for a greedy row, whose other parameters are off
    top_p: T  # OFF
    log_min_p: T  # minus infinity where off
    top_k: T  # 0 where off
    key: T  # 32 random bits of this sample


@dataclass(frozen=True, slots=True)
class SampleParams:
    """Sampling parameters of S rows on the device."""

    rows: RowParams[torch.Tensor]
    wide: torch.Tensor | None  # int64 (W,): filtered rows without a top-k of at most `SamplingOps.max_top_k`
    largest_top_k: int  # of the other rows
    is_greedy: bool  # all rows are


class SamplingOps(Protocol):
    """Sampling stages of a backend. Methods that end in an underscore modify the logits of the rows `index_A` in place."""

    max_top_k: int  # the largest that needs no sorted vocabulary

    def penalise_(
        self, logits_SV: torch.Tensor, index_A: torch.Tensor, counts_RV: torch.Tensor, rows_A: torch.Tensor, penalties_A3: torch.Tensor
    ) -> None:
        """Apply (repetition, frequency, presence) penalties, float32. `counts_RV[rows_A]` (int32): number of times that each token was
        sampled, plus IN_PROMPT if it is in the prompt.

        The logit of a sampled or prompt token is divided by the repetition penalty, or multiplied if negative; then the frequency penalty
        is subtracted per occurrence in the output, and the presence penalty once.
        """

    def mask_(self, logits_SV: torch.Tensor, index_A: torch.Tensor, allowed_AW: torch.Tensor) -> None:
        """Set tokens whose bit is 0 to minus infinity; `allowed_AW` is int32, token t is bit t % 32 of word t // 32."""

    def sample(self, logits_SV: torch.Tensor, params: SampleParams) -> torch.Tensor:
        """Return (S,) int64 token ids, always within the vocabulary."""
