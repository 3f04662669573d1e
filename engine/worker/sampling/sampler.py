"""Sampling stages in order: log-probabilities of the raw logits, changes of rows, sampling, updates of state."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace

from engine.wire.messages import SamplingParams, TokenLogprobs
from engine.worker.masks import Mask, TokenRules
from engine.worker.sampling.samples import Samples, samples_of
from engine.worker.sampling.state import LogitState
from models.config.types import ModelConfig
from models.kernels.paged import Int32s
from models.kernels.sampling import SamplingOps
from models.kernels.transfers import to_host

WARM_UP = SamplingParams(presence_penalty=1.0, bad_words=((1,), (1, 2)), logprobs=1)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of L samples, each with the N most likely tokens, the most likely first, on the host when the step is done."""

    num_top: tuple[int, ...]  # L: how many of the N are requested
    reported_L: torch.Tensor  # int64 indices of samples
    tokens_L: torch.Tensor  # float32, of the sampled tokens
    top_ids_LN: torch.Tensor  # int64
    top_LN: torch.Tensor  # float32


@dataclass(frozen=True, slots=True)
class Sampled:
    tokens_S: torch.Tensor  # int64
    logprobs: Logprobs | None

    def logprobs_per_sample(self) -> list[TokenLogprobs | None]:
        """Return log-probabilities per sample; empty if none are requested. The copies must have reached the host."""
        if self.logprobs is None:
            return []
        found: list[TokenLogprobs | None] = [None] * len(self.tokens_S)
        of = self.logprobs
        values = of.reported_L, of.tokens_L, of.top_ids_LN, of.top_LN
        for n, index, token, top_ids, top in zip(of.num_top, *(part.tolist() for part in values), strict=True):
            found[index] = TokenLogprobs(token, top_ids[:n], top[:n])
        return found


class Sampler:
    """State of all rows, for steps of up to `max_samples`. Only rank 0 samples: logits are not bit-equal on every rank."""

    def __init__(
        self, ops: SamplingOps, max_num_seqs: int, max_samples: int, config: ModelConfig, model_folder: Path, device: torch.device
    ):
        self.rules = TokenRules(model_folder, max_samples, config.text.vocab_size, device)
        self._ops, self._max_samples = ops, max_samples
        self._eos_ids, self._vocab_size, self._device = config.eos_token_ids, config.text.vocab_size, device
        self._state = LogitState(max_num_seqs, config.text.vocab_size, device)

    def admit(self, row: int, params: SamplingParams, ids: Int32s, num_prompt: int) -> None:
        """Assign row `row` to this request: `ids` are those of its prompt, then those sampled before a preemption."""
        self._state.admit(row, params, ids, num_prompt, self._eos_ids)

    @torch.inference_mode()
    def warm_up(self) -> None:
        kinds = [WARM_UP, replace(WARM_UP, top_k=1), replace(WARM_UP, top_k=max(1, self._ops.max_top_k)), replace(WARM_UP, top_p=0.5)]
        with ThreadPoolExecutor() as pool:  # each has a kernel of its own, whose compilation takes ten seconds
            list(pool.map(self._compile, kinds[1:3]))
        positions = range(1, 1 + min(2, self._max_samples))
        for params in kinds:
            self.admit(0, params, np.zeros(1, dtype=np.int32), 1)
            samples = samples_of([params], positions, self._ops.max_top_k, self._device)
            everything = torch.full((1, -(-self._vocab_size // 32)), -1, dtype=torch.int32, device=self._device)
            logits_SV = torch.zeros((len(positions), self._vocab_size), device=self._device)
            self.sample(logits_SV, samples, (torch.zeros_like(samples.rows_S[:1]), everything))

    @torch.inference_mode()
    def _compile(self, params: SamplingParams) -> None:
        logits_1V = torch.zeros((1, self._vocab_size), device=self._device)
        with torch.cuda.device_of(logits_1V):
            self._ops.sample(logits_1V, samples_of([params], range(1), self._ops.max_top_k, self._device).params)

    def sample(self, logits_SV: torch.Tensor, samples: Samples, mask: Mask | None) -> Sampled:
        """Sample a token per row of (S, V) float32 logits, which may be changed. `mask` holds the tokens that `rules` allow."""
        raw_LV = logits_SV[samples.reported_L] if len(samples.reported_L) else None
        if samples.changes:
            self._state.change_(logits_SV, samples, self._ops)
        if mask is not None:
            self._ops.mask_(logits_SV, *mask)
        tokens_S = self._ops.sample(logits_SV, samples.params)
        if samples.changes:
            self._state.note(tokens_S, samples)
        return Sampled(tokens_S, None if raw_LV is None else take_logprobs(raw_LV, tokens_S, samples))


def take_logprobs(raw_LV: torch.Tensor, tokens_S: torch.Tensor, samples: Samples) -> Logprobs:
    norm_L1 = raw_LV.logsumexp(dim=-1, keepdim=True)
    tokens_L1 = tokens_S[samples.reported_L][:, None]
    top_LN, top_ids_LN = raw_LV.topk(max(samples.num_top), dim=-1)
    found = samples.reported_L, (raw_LV.gather(-1, tokens_L1) - norm_L1)[:, 0], top_ids_LN, top_LN - norm_L1
    return Logprobs(samples.num_top, *map(to_host, found))
