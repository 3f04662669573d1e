"""Samples: filters as transformers' warpers, frequencies as the probabilities, noise that depends on seed and position only."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.wire.messages import SamplingParams
from engine.worker.sampling.samples import BYTES_PER_SAMPLE, Samples, SampleTable, samples_of
from engine.worker.sampling.verify import HostProposed
from engine.worker.staging import ALIGNMENT, Staging
from models.kernels.reference.sampling import MASK32, TorchSampling, gumbel_noise, kept, to_uniform
from models.kernels.sampling import SampleParams
from tests.unit.worker.in_process import CPU

VOCAB = 50


def stage(params: list[SamplingParams], positions: list[int]) -> Samples:
    return samples_of(params, positions, 0, CPU)


def sample(logits_SV: torch.Tensor, samples: Samples) -> torch.Tensor:
    return TorchSampling().sample(logits_SV, samples.params)


def filter_logits(logits_SV: torch.Tensor, params: SampleParams) -> torch.Tensor:
    scores_SV = logits_SV * params.rows.inverse_temperature[:, None]
    return scores_SV.masked_fill(~kept(logits_SV, scores_SV, params.rows), -torch.inf)


def test_filters_are_those_of_transformers() -> None:
    logits = torch.randn((5, VOCAB), generator=torch.Generator().manual_seed(0)) * 3
    settings = [(0.7, 10, 0.8, 0.0), (1.3, 0, 0.5, 0.0), (1.0, 5, 1.0, 0.1), (2.0, 0, 1.0, 0.05), (1.0, 7, 1.0, 0.0)]
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in settings]
    ours = filter_logits(logits, stage(params, [0] * 5).params)
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings):
        scores = TemperatureLogitsWarper(temperature)(None, logits[row : row + 1])
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
        torch.testing.assert_close(ours[row], scores[0])


@pytest.mark.parametrize(
    "params", [SamplingParams(seed=7), SamplingParams(seed=8, temperature=0.7, top_k=4, top_p=0.9), SamplingParams(seed=9, min_p=0.1)]
)
def test_frequencies_are_the_probabilities(params: SamplingParams) -> None:
    """Chi-squared of 20,000 samples is beyond the limit in one of 100,000 tests."""
    logits = torch.tensor([2.0, 1.0, 0.0, 1.5, -1.0, 0.5])
    count = 20_000
    samples = stage([params] * count, list(range(count)))
    sampled = sample(logits.expand(count, -1), samples)
    expected = count * filter_logits(logits[None].expand(count, -1), samples.params)[0].softmax(0)
    found = torch.bincount(sampled, minlength=len(logits))
    assert found[expected == 0].sum() == 0
    used = expected > 0
    assert ((found - expected)[used] ** 2 / expected[used]).sum() < 31  # five degrees of freedom: p = 1e-5


def test_staged_samples_take_no_more_than_is_said() -> None:
    """Otherwise a full step would not fit into buffers of `BYTES_PER_SAMPLE` per sample."""
    everything = SamplingParams(top_p=0.5, presence_penalty=1, logprobs=1)
    table, staging, num_rows = SampleTable(512, 0), Staging(1 << 20, CPU), 512
    for row in range(num_rows):
        table.set(row, everything)
    staging.begin()
    drafts = HostProposed(((1,),) * (num_rows // 2), np.zeros(num_rows, dtype=np.int64))
    table.samples(np.arange(num_rows), np.arange(num_rows), drafts).stage(staging)
    left = len(staging.rest(torch.uint8))
    assert abs(num_rows * BYTES_PER_SAMPLE - ((1 << 20) - left)) < 8 * ALIGNMENT


def test_noise_changes_with_seed_and_position() -> None:
    rows = [(1, 10), (1, 11), (2, 10), (1, 10), (2**63 + 1, 10), (-1, 10)]
    keys = stage([SamplingParams(seed=seed) for seed, _ in rows], [at for _, at in rows]).params.rows.key
    noise = gumbel_noise(keys, VOCAB)
    assert noise[0].equal(noise[3]) and len({tuple(row.tolist()) for row in noise}) == 5
    assert noise.isfinite().all()


def test_noise_stays_what_it_was() -> None:
    assert stage([SamplingParams(seed=1234567890123)], [77]).params.rows.key.tolist() == [375773426]
    sampled = sample(torch.zeros((4, 1000)), stage([SamplingParams(seed=seed) for seed in range(4)], [5, 6, 7, 8]))
    assert sampled.tolist() == [780, 850, 206, 2]


def test_noise_is_finite_for_every_hash() -> None:
    """Noise of a hash that rounds to 0 or 1 would sample any token, and be NaN in a greedy row (0 * infinity)."""
    uniform = to_uniform(torch.tensor([0, 1, MASK32 >> 1, MASK32 - 511, MASK32 - 1, MASK32]))
    assert (uniform > 0).all() and (uniform < 1).all()
    assert gumbel_noise(torch.arange(64, dtype=torch.int32) * 0x01000193, 150_000).isfinite().all()


def test_a_tiny_temperature_is_greedy() -> None:
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0)) * 20
    for temperature in (1e-6, 1e-38, 1e-45, 1e-300):
        params = [SamplingParams(temperature=temperature, top_p=0.9, seed=seed) for seed in range(3)]
        assert sample(logits, stage(params, [5] * 3)).tolist() == logits.argmax(-1).tolist(), temperature
