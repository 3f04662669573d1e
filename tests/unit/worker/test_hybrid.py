"""Qwen3.5, a hybrid model, through the engine: rows, chunks, preemption, several answers, graphs and the prefix cache change no answer."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.scheduler import policy, request
from models.cache.spec import SPARE_ROWS, StateGroup
from models.cache.states import RowStates, Snapshots
from models.checkpoint.load import load_weights
from models.decoders.qwen3_vl import Qwen3VL
from models.parallel.group import TensorParallel
from tests.unit.models import harness, qwen3_5_checkpoints
from tests.unit.worker.in_process import Engine, Picture, make_picture
from tests.unit.worker.test_drafts import proposer
from tests.unit.worker.test_graphs import SIZES

NIGHTLY = pytest.mark.nightly

BLOCK = 16
Parts = list[list[int] | Picture]
SAME = 0.0 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 1e-5  # MKL: without it the last bit depends on where memory lies


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Qwen3VL:
    folder = tmp_path_factory.mktemp("hybrid")
    qwen3_5_checkpoints.write(folder)
    return harness.load(folder)


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(length)]


def prompts() -> list[Parts]:
    first = text(40, 0)
    return [
        [first],
        [text(17, 1)],
        [text(5, 2), make_picture(0, 64, 96), text(9, 3)],
        [make_picture(1, 160, 160), make_picture(2, 64, 64), text(33, 4)],
        [[(first[0] + 1) % 300, *first[1:]]],
    ]


def ask(engine: Engine, asked: Sequence[Parts], num_steps_between: int = 1, **params: object) -> list[list[int]]:
    for rid, parts in enumerate(asked):
        engine.add(rid, parts, max_tokens=24, **params)
        for _ in range(num_steps_between):
            engine.step()
    return list(engine.run().values())


@pytest.fixture(scope="module")
def alone(model: Qwen3VL) -> list[list[int]]:
    results = [ask(Engine(model, prefix_cache=False), [parts])[0] for parts in prompts()]
    assert len({tuple(tokens) for tokens in results}) == len(results), "prompts that cannot be told apart test nothing"
    return results


@pytest.mark.parametrize(
    ("chunk", "prefix_cache"),
    [(7, True), *(pytest.param(*case, marks=NIGHTLY) for case in ((1, True), (1, False), (7, False), (16, True), (64, True)))],
)
def test_chunked_equals_whole(model: Qwen3VL, alone: list[list[int]], chunk: int, prefix_cache: bool) -> None:
    engine = Engine(model, prefix_cache=prefix_cache, max_num_batched_tokens=8 + chunk, max_num_mixed_tokens=chunk)
    assert ask(engine, prompts()) == alone


@pytest.mark.parametrize("prefix_cache", [True, pytest.param(False, marks=NIGHTLY)])
def test_preempted_equals_alone(model: Qwen3VL, alone: list[list[int]], prefix_cache: bool) -> None:
    limits = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "max_num_mixed_tokens": 12}
    engine = Engine(model, num_blocks=12, prefix_cache=prefix_cache, **limits)
    assert ask(engine, prompts(), num_steps_between=0) == alone
    assert engine.core.state.counters.preemptions > 0


def test_graphs_carry_the_states(model: Qwen3VL, alone: list[list[int]]) -> None:
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 40, "mixed_step_tokens": 32, "max_num_mixed_tokens": 24}
    engine = Engine(model, graphs=True, sizes=SIZES, **limits)
    assert ask(engine, prompts()) == alone


def logprobs_of(engine: Engine, rid: int) -> list[float]:
    return [entry.logprob for entry in engine.logprobs[rid]]


@pytest.mark.parametrize(
    ("graphs", "chained"), [(True, True), *(pytest.param(*case, marks=NIGHTLY) for case in ((False, False), (False, True), (True, False)))]
)
def test_a_hit_from_a_snapshot_equals_a_cold_run(model: Qwen3VL, graphs: bool, chained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "MIN_SNAPSHOT_TOKENS", 2 * BLOCK)
    monkeypatch.setattr(policy, "SPARE_ROWS", SPARE_ROWS if chained else 0)
    document = [make_picture(1, 160, 160), make_picture(2, 320, 320)]
    shared = text(40, 7)
    questions = [[*document, [*shared, *text(30, seed)]] for seed in (8, 9, 10)]
    engine = Engine(model, graphs=graphs, sizes=SIZES) if graphs else Engine(model)
    computed = []
    for rid, parts in enumerate(questions):
        before = engine.core.state.counters.computed_tokens
        engine.add(rid, parts, max_tokens=8, logprobs=0)
        engine.run()
        computed.append(engine.core.state.counters.computed_tokens - before - 7)
    num_prompt = computed[0]
    num_document = num_prompt - 70
    assert computed[1] == num_prompt - num_document // BLOCK * BLOCK, "hits the end of the images"
    assert computed[2] == num_prompt - (num_document + 40) // BLOCK * BLOCK, "hits where the second question left the first one"
    for rid, parts in enumerate(questions):
        cold = Engine(model, graphs=graphs, sizes=SIZES) if graphs else Engine(model)
        cold.add(0, parts, max_tokens=8, logprobs=0)
        if rid:
            cold.core.state.waiting[0].snapshot_points += ((num_document + 40) // BLOCK * BLOCK,)
        cold.run()
        assert cold.tokens[0] == engine.tokens[rid]
        assert logprobs_of(cold, 0) == pytest.approx(logprobs_of(engine, rid), rel=0, abs=1e-5 if chained else SAME)


def test_a_prompt_is_one_step_with_its_snapshots(model: Qwen3VL) -> None:
    for num_images, most in ((1, 1), (2, 2), (5, 4)):
        engine = Engine(model, prefix_cache=True)
        parts = [part for seed in range(num_images) for part in (make_picture(seed, 64, 64), text(300, seed))]
        engine.add(0, parts, max_tokens=1)
        engine.run()
        assert engine.core.state.num_steps <= most and len(engine.core.state.blocks._snapshots) == 1 + num_images


def test_a_next_turn_goes_on_where_its_thoughts_are_left_out(model: Qwen3VL) -> None:
    for length in range(3 * BLOCK, 4 * BLOCK):
        engine = Engine(model)
        said, opening = text(length, length), [310, 311, 312, 313, 312]  # as <|im_start|>assistant\n<think>\n
        engine.add(0, [[*said, *opening]], max_tokens=3)
        engine.run()
        before = engine.core.state.counters.computed_tokens
        engine.add(1, [[*said, *opening[:3], *text(20, 1)]], max_tokens=1)
        engine.run()
        assert engine.core.state.counters.computed_tokens - before <= 3 + 20 + BLOCK + 8, length


def test_answers_to_one_request_equal_one_alone(model: Qwen3VL) -> None:
    parts = [make_picture(0, 64, 96), text(40, 5)]
    engine = Engine(model)
    engine.add(0, parts, max_tokens=12, n=3, temperature=1.0, seed=5)
    engine.run()
    rest = engine.core.state.counters.computed_tokens - 3 * 11
    for index, tokens in enumerate(engine.tokens.values()):
        single = Engine(model, prefix_cache=False)
        single.add(0, parts, max_tokens=12, temperature=1.0, seed=5 + index)
        assert single.run()[0] == tokens
        assert rest < 2 * (single.core.state.counters.computed_tokens - 11)


def test_states_in_bfloat16_are_half_as_large(model: Qwen3VL, tmp_path: Path) -> None:
    """They change results little, and drafts, graphs and other rows change nothing."""
    qwen3_5_checkpoints.write(tmp_path)
    text = model.config.text
    assert text.delta is not None
    small = replace(model.config, text=replace(text, delta=replace(text.delta, has_bfloat16_state=True)))
    rounded = harness.make(small, TensorParallel.single())
    load_weights(rounded, tmp_path, lambda done, total: None)
    rounded.finish()
    assert rounded.cache_spec.bytes_per_row < 0.6 * model.cache_spec.bytes_per_row
    exact, plain = Engine(model), Engine(rounded)
    for engine in (exact, plain):
        ask(engine, prompts(), logprobs=0)
    differences = [abs(logprobs_of(exact, rid)[1] - logprobs_of(plain, rid)[1]) for rid in range(5)]
    assert 0 < max(differences) < 0.02, "of the first decoded token"
    drafted = Engine(rounded)
    drafted.propose = proposer(plain.tokens, random.Random(0), 0.8)
    assert ask(drafted, prompts()) == list(plain.tokens.values()) and drafted.core.state.counters.accepted_draft_tokens > 20
    limits = {"max_num_seqs": 5, "max_num_batched_tokens": 400, "mixed_step_tokens": 400, "max_num_mixed_tokens": 400}
    assert ask(Engine(rounded, graphs=True, sizes=SIZES, **limits), prompts()) == list(plain.tokens.values())


def test_a_snapshot_comes_back_and_leaves_nothing_behind() -> None:
    states = [RowStates(StateGroup(2, 40, 8), 3, torch.device("cpu"), 2), RowStates(StateGroup(1, 100), 3, torch.device("cpu"))]
    pools = [(torch.zeros(9, 4, 1, 2), torch.zeros(9, 4, 1, 2)) for _ in range(2)]
    snapshots = Snapshots(pools, states)
    for group in states:
        group.values.random_(0, 256)
        group.values[:, 1] = 255  # NaN as float32
    kept = [group.kept[:, 1].clone() for group in states]
    states[0].accept(torch.tensor([1, 2]), torch.tensor([2, 1]))
    snapshots.save(1, [5, 2])
    snapshots.load(1, [])
    assert not any(group.kept[:, 1].any() for group in states)
    snapshots.load(2, [5, 2])
    assert not states[0].num_accepted.any(), "drafts of the row's last request are done again"
    assert all(bool((group.kept[:, 2] == values).all()) for group, values in zip(states, kept, strict=True))
    assert all(bool((pages[[0, 1, 3, 4, 6, 7, 8]] == 0).all()) for pool in pools for pages in pool), "writes beside its blocks"
    snapshots.clear([2, 3])
    assert all(bool((pages[2] == 0).all()) for pool in pools for pages in pool) and pools[0][0][5].isnan().any()
