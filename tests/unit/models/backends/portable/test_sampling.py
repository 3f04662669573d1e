"""Sampling kernels in Triton's interpreter: the tokens, and the changed logits, are those of plain torch."""

import math

import pytest
import torch

from engine.wire.params import SamplingParams
from engine.worker.sampling.samples import samples_of
from models.kernels.reference.sampling import TorchSampling
from models.kernels.sampling import IN_PROMPT, OFF, SampleParams
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted

CPU = torch.device("cpu")
GREEDY, PLAIN, TOP_P, MIN_P = (0.0, 0, OFF, 0.0), (1.3, 0, OFF, 0.0), (1.0, 0, 0.9, 0.0), (1.0, 0, OFF, 0.1)
FILTERED = (1 / 0.7, 3, 0.8, 0.0), (1.0, 1, OFF, 0.0), (0.5, 7, OFF, 0.05), (1.0, 8, 0.95, 0.01)
WIDE = 0.9, 40, OFF, 0.0


def params_of(rows: list[tuple[float, int, float, float]], max_top_k: int, seed: int) -> SampleParams:
    params = [SamplingParams(temperature=1 / x if x else 0.0, top_k=k, top_p=p, min_p=m, seed=seed) for x, k, p, m in rows]
    return samples_of(params, range(len(rows)), max_top_k, CPU).params


def make_logits(kind: str, rows: int, vocab_size: int, seed: int) -> torch.Tensor:
    logits = (torch.randn((rows, vocab_size), generator=torch.Generator().manual_seed(seed)) * 3).bfloat16().float()
    if kind == "ties":
        logits = logits.round() * logits.sign()  # also minus zero beside zero
    elif kind == "few":
        logits[:, 5 : vocab_size - 2] = -torch.inf
    elif kind == "one":
        logits[:, :-1] = -torch.inf
    elif kind == "none":
        logits[:] = -torch.inf
    return logits


@interpreted
@pytest.mark.parametrize(
    ("vocab_size", "kind"),
    [(30, "random"), pytest.param(200, "ties", marks=in_gate), (257, "few"), (30, "one"), (257, "none"), (257, "random")],
)
def test_tokens_are_those_of_torch(vocab_size: int, kind: str) -> None:
    from models.kernels.triton.sampling import Tiles, TritonSampling

    kernels = TritonSampling(16, vocab_size, CPU, Tiles(group=4, tile=64, candidates=(4, 8)))
    for seed, rows in enumerate(([GREEDY, PLAIN, *FILTERED, TOP_P, MIN_P, WIDE], [FILTERED[0], GREEDY], [PLAIN], [GREEDY] * 2, [WIDE])):
        logits = make_logits(kind, len(rows), vocab_size, seed)
        sampled = kernels.sample(logits.clone(), params_of(rows, kernels.max_top_k, seed))
        assert sampled.tolist() == TorchSampling().sample(logits, params_of(rows, 0, seed)).tolist()


@interpreted
def test_tokens_do_not_depend_on_tiles_or_neighbours() -> None:
    from models.kernels.triton.sampling import Tiles, TritonSampling

    logits, rows = make_logits("ties", 4, 300, 0), [FILTERED[0], PLAIN, GREEDY, FILTERED[0]]
    tokens = []
    for tiles in (Tiles(4, 32, (4,)), Tiles(8, 128, (8,)), Tiles(16, 64, (2, 4))):
        tokens.append(TritonSampling(4, 300, CPU, tiles).sample(logits, params_of(rows, 4, 3)).tolist())
    beside = [*rows[:3], WIDE, FILTERED[3]]
    more = torch.cat((logits, logits[:1]))
    tokens.append(TritonSampling(8, 300, CPU, Tiles(4, 32, (4, 8))).sample(more, params_of(beside, 8, 3))[:3].tolist() + tokens[0][3:])
    assert tokens[1:] == tokens[:1] * 3


@interpreted(gate=True)
def test_penalties_and_masks_are_those_of_torch() -> None:
    from models.kernels.triton.sampling import TritonSampling

    generator, vocab_size = torch.Generator().manual_seed(0), 5000
    logits = make_logits("random", 4, vocab_size, 0)
    logits[1, :7] = -torch.inf
    counts = torch.randint(0, 4, (3, vocab_size), generator=generator, dtype=torch.int32)
    counts += IN_PROMPT * torch.randint(0, 2, counts.shape, generator=generator, dtype=torch.int32)
    penalties, index = torch.tensor([[1.3, 0.5, 0.25], [1.0, -1.0, 2.0]]), torch.tensor([1, 3])
    words = torch.randint(-(2**31), 2**31, (2, math.ceil(vocab_size / 32)), generator=generator).int()
    results = []
    for ops in (TritonSampling(4, vocab_size, CPU), TorchSampling()):
        changed = logits.clone()
        ops.penalise_(changed, index, counts, torch.tensor([2, 0]), penalties)
        ops.mask_(changed, index, words)
        results.append(changed)
    torch.testing.assert_close(*results)
    assert results[0][[0, 2]].equal(logits[[0, 2]]) and not results[0][1].equal(logits[1])
