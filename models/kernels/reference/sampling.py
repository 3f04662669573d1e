"""Sampling in plain torch: the reference, also used for rows whose filter needs a sorted vocabulary."""

import torch

from models.kernels.sampling import IN_PROMPT, MASS_BITS, RowParams, SampleParams

MASK32 = 0xFFFFFFFF


class TorchSampling:
    """See `models.kernels.sampling.SamplingOps`. Every random row is sorted if one row of the step has a filter."""

    max_top_k = 0

    def penalise_(
        self, logits_SV: torch.Tensor, index_A: torch.Tensor, counts_RV: torch.Tensor, rows_A: torch.Tensor, penalties_A3: torch.Tensor
    ) -> None:
        logits_AV, counts_AV = logits_SV[index_A], counts_RV[rows_A]
        repetition, frequency, presence = penalties_A3[:, :, None].unbind(1)
        repeated_AV = torch.where(logits_AV > 0, logits_AV / repetition, logits_AV * repetition)
        sampled_AV = counts_AV & (IN_PROMPT - 1)
        penalty_AV = frequency * sampled_AV + presence * (sampled_AV > 0)
        logits_SV[index_A] = torch.where(counts_AV > 0, repeated_AV, logits_AV) - penalty_AV

    def mask_(self, logits_SV: torch.Tensor, index_A: torch.Tensor, allowed_AW: torch.Tensor) -> None:
        bits = torch.arange(32, dtype=torch.int32, device=allowed_AW.device)
        allowed_AV = ((allowed_AW[:, :, None] >> bits) & 1).flatten(1)[:, : logits_SV.shape[1]]
        logits_SV[index_A] = logits_SV[index_A].masked_fill(allowed_AV == 0, -torch.inf)

    def sample(self, logits_SV: torch.Tensor, params: SampleParams) -> torch.Tensor:
        best_S = logits_SV.argmax(dim=-1)
        if params.is_greedy:
            return best_S
        return torch.where(params.rows.inverse_temperature == 0, best_S, sample_random(logits_SV, params.rows, params.wide is not None))


def sample_random(logits_SV: torch.Tensor, params: RowParams[torch.Tensor], any_filter: bool) -> torch.Tensor:
    """Return the (S,) tokens of random rows; values of greedy rows are undefined."""
    scores_SV = logits_SV.float() * params.inverse_temperature[:, None]
    if any_filter:
        scores_SV = scores_SV.masked_fill(~kept(logits_SV.float(), scores_SV, params), -torch.inf)
    return (scores_SV + gumbel_noise(params.key, logits_SV.shape[-1])).argmax(dim=-1)


def kept(logits_SV: torch.Tensor, scores_SV: torch.Tensor, params: RowParams[torch.Tensor]) -> torch.Tensor:
    """Return the mask of tokens that each row's filters keep, see `models.kernels.sampling`."""
    order = logits_SV.sort(dim=-1, descending=True, stable=True).indices
    scores_SV = scores_SV.gather(-1, order)
    ranks = torch.arange(logits_SV.shape[-1], device=logits_SV.device)
    top_k = params.top_k[:, None]
    is_kept = (top_k == 0) | (ranks < top_k)
    distance = torch.where(scores_SV > -torch.inf, scores_SV - scores_SV[:, :1], -torch.inf)
    mass = (distance.exp() * 2.0**MASS_BITS).long() * is_kept
    limit = (mass.sum(dim=-1).double() * params.top_p.double()).long()
    is_kept &= (mass.cumsum(dim=-1) - mass < limit[:, None]) & (distance >= params.log_min_p[:, None])
    return torch.empty_like(is_kept).scatter_(-1, order, is_kept | (ranks == 0))


def gumbel_noise(key_S: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return (S, V) float32 standard Gumbel noise, a pure function of key and token id."""
    tokens = torch.arange(vocab_size, device=key_S.device)
    bits = _mix32((tokens * 0x9E3779B1 & MASK32) ^ (key_S.long() & MASK32)[:, None])
    return -(-to_uniform(bits).log()).log()


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """Convert 32 random bits to float32 in the open interval (0, 1). 23 bits are used: with 24 the largest value would round to 1."""
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors: products wrap, but the low bits are exact."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)
