"""Draws the next tokens from logits, on rank 0. Greedy is argmax; everything else is one perturbed argmax (Gumbel-max).

Called by the runner. The noise of a token depends on (seed, position, token id) only, so a seed gives the same text whatever the row,
the batch, the chunking or a preemption.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.messages import SamplingParams
from engine.worker.staging import Staging

MASK32 = 0xFFFFFFFF
MIN_TEMPERATURE = 1e-5  # below it the noise is lost beside the logits anyway, and their quotient may overflow


class Draw(NamedTuple):
    """A token to draw: the permanent row that receives it, and its index in the row's sequence."""

    row: int
    params: SamplingParams
    position: int


@dataclass(frozen=True, slots=True)
class SamplingInputs:
    """How S rows draw a token: tensors (S, 1) on the device, and which parts of the work are needed at all."""

    rows_S: torch.Tensor  # int64, permanent rows that receive the tokens
    temperature: torch.Tensor  # float32; greedy rows have 1 here and 0 in `noise_scale`
    noise_scale: torch.Tensor
    top_k: torch.Tensor  # int64; the vocabulary size or more where off
    top_p: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    keys: torch.Tensor  # int64: 32 random bits of each draw
    any_random: bool
    any_top: bool  # some row uses top-k or top-p
    any_min_p: bool

    @property
    def num_rows(self) -> int:
        return self.rows_S.shape[0]

    @classmethod
    def stage(cls, draws: Sequence[Draw], staging: Staging) -> "SamplingInputs":
        """Puts what they need into `staging`, whose `copy` comes later. A greedy row needs no noise, so it has no key."""
        params = [draw.params for draw in draws]
        floats = [(max(p.temperature or 1.0, MIN_TEMPERATURE), float(p.temperature > 0), _top_p(p), p.min_p) for p in params]
        ints = [(row, _top_k(p), _key(p.seed, at) if p.temperature > 0 else 0) for row, p, at in draws]
        temperature, scale, top_p, min_p = staging.put(np.asarray(floats, dtype=np.float32).reshape(-1, 4, 1).transpose(1, 0, 2))
        rows_S, top_k, keys = staging.put(np.asarray(ints, dtype=np.int64).reshape(-1, 3, 1).transpose(1, 0, 2))
        random = [p for p in params if p.temperature > 0]
        return cls(
            rows_S=rows_S[:, 0],
            temperature=temperature,
            noise_scale=scale,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            keys=keys,
            any_random=bool(random),
            any_top=any(p.top_k > 0 or p.top_p < 1 for p in random),
            any_min_p=any(p.min_p > 0 for p in random),
        )


def sample(logits_SV: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """(S,) int64 token ids."""
    if not inputs.any_random:
        return logits_SV.argmax(dim=-1)
    scores_SV = filter_logits(logits_SV.float() / inputs.temperature, inputs)
    return (scores_SV + inputs.noise_scale * gumbel_noise(inputs.keys, logits_SV.shape[-1])).argmax(dim=-1)


def filter_logits(logits_SV: torch.Tensor, inputs: SamplingInputs) -> torch.Tensor:
    """Minus infinity where top-k, top-p or min-p exclude a token, in this order (as transformers' warpers). The best token always stays."""
    if inputs.any_top:
        ordered, order = logits_SV.sort(dim=-1, descending=True)
        ranks = torch.arange(logits_SV.shape[-1], device=logits_SV.device)
        ordered = ordered.masked_fill(ranks >= inputs.top_k, -torch.inf)
        probabilities = ordered.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        ordered = ordered.masked_fill((before >= inputs.top_p) & (ranks > 0), -torch.inf)
        logits_SV = torch.empty_like(ordered).scatter_(-1, order, ordered)
    if inputs.any_min_p:
        threshold = logits_SV.amax(dim=-1, keepdim=True) + inputs.min_p.log()
        logits_SV = logits_SV.masked_fill(logits_SV < threshold, -torch.inf)
    return logits_SV


def gumbel_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """(S, V) float32 standard Gumbel noise from (S, 1) keys, a pure function of key and token id."""
    tokens = torch.arange(vocab_size, device=keys.device)
    bits = _mix32((tokens * 0x9E3779B1 & MASK32) ^ keys)
    return -(-to_uniform(bits).log()).log()


def to_uniform(bits: torch.Tensor) -> torch.Tensor:
    """32 random bits -> float32 in (0, 1), the ends excluded. 23 bits: with 24 the half would be rounded away and the largest be 1."""
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def _top_p(params: SamplingParams) -> float:
    """Where it is off, more than any rounded sum of probabilities: rows beside it may use it."""
    return params.top_p if params.temperature > 0 and params.top_p < 1 else 2.0


def _top_k(params: SamplingParams) -> int:
    """Where it is off, more than there are tokens. A greedy row keeps all: which of its best ones is first, sorting would decide."""
    return params.top_k if params.temperature > 0 and params.top_k > 0 else MASK32


def _key(seed: int, position: int) -> int:
    """32 bits for one draw: splitmix64's finaliser over seed and position."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
    return (x ^ (x >> 31)) & MASK32


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """MurmurHash3's 32-bit finaliser on int64 tensors that hold 32-bit values; products wrap, the low bits are right."""
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & MASK32
    return x ^ (x >> 16)
