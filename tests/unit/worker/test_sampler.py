"""The sampler: filters as transformers' warpers, frequencies as the probabilities, noise that depends on seed and position only."""

import torch
from transformers.generation.logits_process import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from engine.messages import SamplingParams
from engine.worker.sampler import MASK32, Draw, SamplingInputs, filter_logits, gumbel_noise, sample, to_uniform
from engine.worker.staging import Staging
from tests.unit.worker.in_process import CPU

VOCAB = 50


def stage(params: list[SamplingParams], positions: list[int]) -> SamplingInputs:
    staging = Staging(1 << 20, CPU)
    staging.begin()
    inputs = SamplingInputs.stage([Draw(row, *pair) for row, pair in enumerate(zip(params, positions, strict=True))], staging)
    staging.copy()
    return inputs


def test_filters_are_those_of_transformers() -> None:
    """Red if temperature, top-k, top-p or min-p keep another set of tokens."""
    logits = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(0)) * 3
    settings = [(0.7, 10, 0.8, 0.0), (1.3, 0, 0.5, 0.0), (1.0, 5, 1.0, 0.1), (2.0, 0, 1.0, 0.05)]
    params = [SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in settings]
    inputs = stage(params, [0] * 4)
    ours = filter_logits(logits / inputs.temperature, inputs)
    for row, (temperature, top_k, top_p, min_p) in enumerate(settings):
        scores = TemperatureLogitsWarper(temperature)(None, logits[row : row + 1])
        scores = TopKLogitsWarper(top_k)(None, scores) if top_k else scores
        scores = TopPLogitsWarper(top_p)(None, scores) if top_p < 1 else scores
        scores = MinPLogitsWarper(min_p)(None, scores) if min_p else scores
        torch.testing.assert_close(ours[row], scores[0])


def test_frequencies_are_the_probabilities() -> None:
    """Red if the noise is not Gumbel noise: 20,000 draws, each token within five standard deviations."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    count = 20_000
    inputs = stage([SamplingParams(temperature=1.0, seed=7)] * count, list(range(count)))
    drawn = sample(logits.expand(count, -1), inputs)
    probabilities = logits.softmax(0)
    deviation = (probabilities * (1 - probabilities) / count).sqrt()
    assert ((torch.bincount(drawn, minlength=5) / count - probabilities).abs() < 5 * deviation).all()


def test_rows_do_not_influence_each_other() -> None:
    """Red if a greedy row becomes random beside a random one, or a draw depends on its neighbours."""
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(1))
    greedy, random = SamplingParams(temperature=0.0, top_k=3), SamplingParams(temperature=1.5, seed=3, top_p=0.9)
    mixed = sample(logits, stage([greedy, random, greedy], [4, 5, 6]))
    assert mixed[0] == logits[0].argmax() and mixed[2] == logits[2].argmax()
    assert mixed[1] == sample(logits[1:2], stage([random], [5]))[0]


def test_ties_and_tails_do_not_depend_on_neighbours() -> None:
    """Red if sorting for a row with top-k or top-p decides between a greedy row's best tokens, or cuts the tail of a row without."""
    generator = torch.Generator().manual_seed(2)
    greedy, all_tokens = SamplingParams(temperature=0.0, top_k=1), SamplingParams(temperature=1.0)
    for position in range(50):
        logits = torch.randn((1, 2000), generator=generator)
        logits[0, torch.randperm(2000, generator=generator)[:3]] = 20
        other = SamplingParams(temperature=1.0, top_k=1, top_p=0.5, seed=position)
        both = sample(logits.expand(2, -1), stage([greedy, other], [position] * 2))
        assert both[0] == sample(logits, stage([greedy], [position]))[0]
    flat = torch.randn((1, 150_000), generator=generator) * 3
    kept = filter_logits(flat.expand(2, -1), stage([all_tokens, SamplingParams(temperature=1.0, top_p=0.5)], [1, 1]))
    assert kept[0].isfinite().all() and not kept[1].isfinite().all()


def test_noise_changes_with_seed_and_position() -> None:
    """Red if two positions, or two seeds, share their noise."""
    rows = [(1, 10), (1, 11), (2, 10), (1, 10)]
    keys = stage([SamplingParams(temperature=1.0, seed=seed) for seed, _ in rows], [at for _, at in rows]).keys
    noise = gumbel_noise(keys, VOCAB)
    assert noise[0].equal(noise[3]) and not noise[0].equal(noise[1]) and not noise[0].equal(noise[2])
    assert noise.isfinite().all()


def test_noise_is_finite_for_every_hash() -> None:
    """Red if a hash rounds to 0 or 1: its noise would be infinite, draw any token, and be NaN in a greedy row beside it (0 * infinity)."""
    uniform = to_uniform(torch.tensor([0, 1, MASK32 >> 1, MASK32 - 511, MASK32 - 1, MASK32]))
    assert (uniform > 0).all() and (uniform < 1).all()
    assert gumbel_noise(torch.arange(64)[:, None] * 0x01000193, 150_000).isfinite().all()


def test_a_tiny_temperature_is_greedy() -> None:
    """Red if logits divided by a temperature overflow: every token would tie at infinity, or be NaN."""
    logits = torch.randn((3, VOCAB), generator=torch.Generator().manual_seed(0)) * 20
    for temperature in (1e-6, 1e-38, 1e-45, 1e-300):
        params = [SamplingParams(temperature=temperature, top_p=0.9, seed=seed) for seed in range(3)]
        assert sample(logits, stage(params, [5] * 3)).tolist() == logits.argmax(-1).tolist(), temperature
