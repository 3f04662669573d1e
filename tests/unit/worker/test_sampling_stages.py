"""Changes of logits before sampling, and reported log-probabilities: each step of real requests against numpy formulas."""

from typing import Any

import numpy as np
import pytest
import torch

from engine.wire.params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, SamplingParams
from engine.worker.sampling import reports
from engine.worker.sampling.sampler import Sampled, Sampler
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.reference.sampling import TorchSampling
from tests.unit.worker.in_process import Engine

PROMPT = [5, 9, 9, 13, 20, 250, 250, 250, 7]
OUTPUT = 40
GREEDY: dict[str, object] = {"temperature": 0.0}
PENALISED = [
    {**GREEDY, "presence_penalty": 1.5},
    {**GREEDY, "frequency_penalty": 0.7},
    {**GREEDY, "repetition_penalty": 1.6},
    {**GREEDY, "presence_penalty": -0.4, "frequency_penalty": 0.2, "repetition_penalty": 0.8},
    {**GREEDY, "presence_penalty": 2.0, "logit_bias": ((11, 3.0), (12, -100.0), (250, 2.0))},
]
OTHERS = [
    {"temperature": 0.9, "seed": 3, "top_k": 20, "top_p": 0.8, "presence_penalty": 1.5},
    {"temperature": 1.2, "seed": 4, "frequency_penalty": 0.5, "min_p": 0.02},
    {**GREEDY},
    {"temperature": 1.0, "seed": 5},
]


@pytest.fixture
def raw(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    logits = []
    sample = Sampler.sample

    def note_and_sample(sampler: Sampler, logits_SV: torch.Tensor, *rest: Any) -> Sampled:
        logits.extend(logits_SV.clone().numpy())
        return sample(sampler, logits_SV, *rest)

    monkeypatch.setattr(Sampler, "sample", note_and_sample)
    return logits


def run_alone(model: Qwen3VL, params: dict[str, object], **kwargs: Any) -> list[int]:
    engine = Engine(model, **kwargs)
    engine.add(0, [PROMPT], max_tokens=OUTPUT, **params)
    return engine.run()[0]


def best_by_formula(logits_V: np.ndarray, output: list[int], params: SamplingParams) -> int:
    scores = logits_V.astype(np.float64)
    for token, bias in params.logit_bias:
        scores[token] += bias
    for token in {*PROMPT, *output}:
        scores[token] = scores[token] / params.repetition_penalty if scores[token] > 0 else scores[token] * params.repetition_penalty
    for token in set(output):
        scores[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return int(scores.argmax())


def test_penalties_and_biases_are_the_formulas(model: Qwen3VL, raw: list[np.ndarray]) -> None:
    greedy = run_alone(model, GREEDY)
    for params in PENALISED:
        raw.clear()
        output = run_alone(model, params)
        expected = [best_by_formula(logits, output[:i], SamplingParams(**params)) for i, logits in enumerate(raw)]
        assert output == expected and output != greedy, params


def test_penalties_of_negative_logits() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, -1.0]])
    index, counts, penalties = torch.tensor([0]), torch.tensor([[1, 1, 0, 0]], dtype=torch.int32), torch.tensor([[2.0, 0.0, 0.0]])
    TorchSampling().penalise_(logits, index, counts, torch.tensor([0]), penalties)
    assert logits.tolist() == [[1.0, -4.0, 1.0, -1.0]]


def test_rows_share_steps_and_survive_a_preemption(model: Qwen3VL) -> None:
    words = tuple((first, second) for first in run_alone(model, OTHERS[0])[20:30] for second in range(10))[:MAX_BAD_WORDS]
    settings = [*PENALISED, *OTHERS, {**OTHERS[0], "bad_words": words, "min_tokens": 30, "stop_token_ids": tuple(range(100))}]
    alone = [run_alone(model, params) for params in settings]
    engine = Engine(model, max_num_seqs=4, num_blocks=9, prefix_cache=False)
    for rid, params in enumerate(settings):
        engine.add(rid, [PROMPT], max_tokens=OUTPUT, **params)
    tokens = engine.run()
    assert [tokens[rid] for rid in range(len(settings))] == alone
    assert engine.core.state.counters.preemptions > 0


def test_no_end_before_the_minimum(model: Qwen3VL) -> None:
    free = run_alone(model, {"temperature": 1.0, "seed": 1})
    stop = {"temperature": 1.0, "seed": 1, "stop_token_ids": tuple(set(free[:8]))}
    assert len(run_alone(model, stop)) == 1
    held = run_alone(model, {**stop, "min_tokens": 6})
    assert len(held) >= 7 and not set(held[:6]) & set(free[:8])
    certain = ((free[0], 100.0),)
    assert len(run_alone(model, {**stop, "logit_bias": certain, "min_tokens": 6})) == 7
    assert len(run_alone(model, {**stop, "logit_bias": certain})) == 1


def test_the_end_token_is_banned_too(model: Qwen3VL) -> None:
    eos = model.config.eos_token_ids
    bias = tuple((token, 100.0) for token in eos)
    assert run_alone(model, {**GREEDY, "logit_bias": bias, "ignore_eos": False})[0] in eos
    held = run_alone(model, {**GREEDY, "logit_bias": bias, "ignore_eos": False, "min_tokens": 5})
    assert len(held) == 6 and not set(held[:5]) & set(eos) and held[5] in eos
    assert run_alone(model, {**GREEDY, "logit_bias": bias, "min_tokens": 5})[0] in eos


def contains(output: list[int], word: tuple[int, ...]) -> bool:
    return any(tuple(output[i : i + len(word)]) == word for i in range(len(output)))


def test_bad_words_never_come(model: Qwen3VL, raw: list[np.ndarray]) -> None:
    free = run_alone(model, GREEDY)
    words = ((free[0],), tuple(free[3:5]), tuple(free[8:11]), tuple(free[5 : 5 + MAX_BAD_WORD_TOKENS]), (PROMPT[-1], free[1]))
    raw.clear()
    output = run_alone(model, {**GREEDY, "bad_words": words})
    assert not any(contains(output, word) for word in words[:-1])
    for i, logits in enumerate(raw):
        ends = [word[-1] for word in words if tuple(output[:i][len(output[:i]) - len(word) + 1 :]) == word[:-1] and i >= len(word) - 1]
        logits[ends] = -np.inf
        assert output[i] == logits.argmax()


@pytest.mark.parametrize("params", [{**GREEDY}, OTHERS[0], {**PENALISED[4], "bad_words": ((3,),)}])
def test_logprobs_are_those_of_the_raw_logits(model: Qwen3VL, raw: list[np.ndarray], params: dict[str, object]) -> None:
    engine = Engine(model)
    engine.add(0, [PROMPT], max_tokens=OUTPUT, logprobs=4, **params)
    tokens, reported = engine.run()[0], engine.logprobs[0]
    assert tokens == run_alone(model, params) and len(reported) == OUTPUT
    for token, logits, item in zip(tokens, raw, reported, strict=False):
        logprobs = torch.from_numpy(logits).log_softmax(-1)
        top = logprobs.topk(4)
        assert item.logprob == pytest.approx(float(logprobs[token]), abs=1e-5)
        assert item.top_ids == top.indices.tolist() and item.top_logprobs == pytest.approx(top.values.tolist(), abs=1e-5)


def expected_prompt_logprobs(model: Qwen3VL, prompt: list[int]) -> torch.Tensor:
    engine, vocab_size = Engine(model), model.config.text.vocab_size
    for length in range(1, len(prompt)):
        engine.add(length, [prompt[:length]], max_tokens=1, logprobs=vocab_size)
    engine.run()
    rows = torch.empty((len(prompt) - 1, vocab_size))
    for length in range(1, len(prompt)):
        (item,) = engine.logprobs[length]
        rows[length - 1, item.top_ids] = torch.tensor(item.top_logprobs)
    return rows


@pytest.mark.parametrize(("chunk", "num_blocks"), [pytest.param(8192, 256, marks=pytest.mark.nightly), (5, 256), (16, 12)])
def test_prompt_logprobs(model: Qwen3VL, monkeypatch: pytest.MonkeyPatch, chunk: int, num_blocks: int) -> None:
    monkeypatch.setattr(reports, "SLICE", 7)
    prompts = [[(7 * i * (rid + 3)) % 290 for i in range(37)] for rid in range(3)]
    engine = Engine(model, num_blocks=num_blocks, max_num_batched_tokens=chunk, max_num_mixed_tokens=chunk)
    plain = Engine(model)
    for rid, prompt in enumerate([prompts[0], *prompts, [3]]):
        wanted = None if rid == 0 else rid
        engine.add(rid, [prompt], max_tokens=30, logprobs=1, prompt_logprobs=wanted)
        plain.add(rid, [prompt], max_tokens=30)
        if rid == 0:
            engine.step()
    assert engine.run() == plain.run()
    assert (engine.core.state.counters.preemptions > 0) == (num_blocks == 12)
    assert engine.reports.keys() == {1, 2, 3}
    for rid, prompt in enumerate(prompts, 1):
        expected, found = expected_prompt_logprobs(model, prompt), engine.reports[rid]
        assert (found.start, len(found.logprobs) // 4, found.num_top) == (1, len(prompt) - 1, rid)
        top = expected.topk(rid)
        top_ids = np.frombuffer(found.top_ids, dtype=np.int32).reshape(-1, rid)
        assert top_ids.tolist() == top.indices.tolist()
        np.testing.assert_allclose(np.frombuffer(found.top_logprobs, dtype=np.float32).reshape(-1, rid), top.values, atol=1e-4)
        of_tokens = expected[range(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(np.frombuffer(found.logprobs, dtype=np.float32), of_tokens, atol=1e-4)
