"""How the rows of a step draw their tokens. All backends give the same tokens.

A row's score is its logit over the temperature. Filters keep the best tokens in the order (logit descending, id ascending): the `top_k`
first; of these the first whose renormalised probabilities reach `top_p`, the one that crosses it included; of these the ones not less
probable than `min_p` times the best. The token has the largest score plus Gumbel noise, the lowest id of several.

The noise is a function of the row's key and the token id. Probabilities are summed as integers, so no order of a sum decides anything.
"""

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch

MASS_BITS = 40  # of a token's probability over the best one's: the sum over a vocabulary fits into 63 bits
OFF = 2.0  # a `top_p` that keeps everything
IN_PROMPT = 1 << 30  # added to the count of a token of the prompt
INTEGERS = ("top_k", "key")  # of `RowParams`: int32, the others are float32
T = TypeVar("T")


class RowParams(NamedTuple, Generic[T]):
    """By what one row draws, or tensors (S,) for S rows: four bytes a value. Kernels take them in this order."""

    inverse_temperature: T  # 0 for a greedy row, whose other parameters are off
    top_p: T  # OFF
    log_min_p: T  # minus infinity where off
    top_k: T  # 0 where off
    key: T  # 32 random bits of this draw


@dataclass(frozen=True, slots=True)
class DrawParams:
    """S rows on the device."""

    rows: RowParams[torch.Tensor]
    wide: torch.Tensor | None  # int64 (W,): filtered rows that are not cut by a top-k up to `SamplingOps.max_top_k` first
    largest_top_k: int  # of the other rows
    is_greedy: bool  # all rows are


class SamplingOps(Protocol):
    """A backend's stages of sampling. Methods that end in an underscore change logits in place, of the rows `index_A` only."""

    max_top_k: int  # the largest that needs no sorted vocabulary

    def penalise_(
        self, logits_SV: torch.Tensor, index_A: torch.Tensor, counts_RV: torch.Tensor, rows_A: torch.Tensor, penalties_A3: torch.Tensor
    ) -> None:
        """Penalties are (repetition, frequency, presence), float32. `counts_RV[rows_A]` (int32): how often each token was drawn, plus
        IN_PROMPT if it is in the prompt.

        A logit of a token that was drawn or is in the prompt is divided by the repetition penalty, or multiplied if negative; then it loses
        the frequency penalty for each time it was drawn, and the presence penalty if drawn at all.
        """

    def mask_(self, logits_SV: torch.Tensor, index_A: torch.Tensor, allowed_AW: torch.Tensor) -> None:
        """Minus infinity for tokens whose bit is 0; `allowed_AW` is int32, token t is bit t % 32 of word t // 32."""

    def draw(self, logits_SV: torch.Tensor, params: DrawParams) -> torch.Tensor:
        """(S,) int64 token ids, always within the vocabulary."""
