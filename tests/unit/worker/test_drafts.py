"""Draft tokens change the number of steps and nothing else: right, wrong and partly right ones, with every sampling parameter."""

import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from engine.grammar.compile import compiled as compile_grammar
from engine.grammar.compile import read_vocabulary
from engine.scheduler.request import Request
from engine.wire.grammar import Grammar
from engine.wire.messages import MAX_PROPOSED
from models.checkpoint.load import init_dummy_weights
from models.decoders.qwen3_vl import Qwen3VL
from models.demo import CHECKPOINT
from tests.unit.models import harness, qwen3_5_checkpoints
from tests.unit.scheduler.simulation import Key, key_of
from tests.unit.worker.in_process import Engine, Picture, load_model, make_picture
from tests.unit.worker.test_graphs import SIZES

OUTPUT = 40
ANY: dict[str, Any] = {"temperature": 1.0}
REGEX = Grammar("regex", r"[a-f]{3}-[0-9]{2,4}!( [a-z]+)*\.")


KINDS = ("attention", "Qwen3.5")


def in_gate_on(kind: str) -> pytest.MarkDecorator:
    cases = [pytest.param(one, marks=() if one == kind else pytest.mark.nightly) for one in KINDS]
    return pytest.mark.parametrize("model", cases, indirect=True, scope="module")


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Qwen3VL]:
    if request.param == "Qwen3.5":
        folder: Path = tmp_path_factory.mktemp("hybrid")
        demo = json.loads((CHECKPOINT / "config.json").read_text())  # whose grammars count its tokens
        ids = {name: demo[name] for name in qwen3_5_checkpoints.IDS}
        qwen3_5_checkpoints.write(folder, ids=ids, vocab_size=demo["text_config"]["vocab_size"])
        shutil.copy(CHECKPOINT / "generation_config.json", folder)
        yield harness.load(folder)
    else:
        made_up = load_model(CHECKPOINT)
        init_dummy_weights(made_up, seed=0)
        yield made_up


@pytest.fixture(scope="module")
def regex() -> bytes:
    return compiled_regex()


def compiled_regex() -> bytes:
    data = compile_grammar(xgrammar.GrammarCompiler(read_vocabulary(CHECKPOINT), cache_enabled=False), REGEX).data
    assert data
    return data


def text(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(300) for _ in range(length)]


GRAPHS: dict[str, Any] = {"graphs": True, "sizes": SIZES}
FEW_BLOCKS: dict[str, Any] = {"num_blocks": 26, "prefix_cache": False}
LIMITS: list[tuple[dict[str, Any], float]] = [({}, 0.0), ({}, 0.8), (GRAPHS, 0.0), (GRAPHS, 0.8), (FEW_BLOCKS, 0.0), (FEW_BLOCKS, 0.8)]
IN_GATE = (("attention", FEW_BLOCKS, 0.8), ("Qwen3.5", GRAPHS, 0.8))


def ask_everything(engine: Engine, regex: bytes, free: list[int]) -> None:
    words = (*itertools.pairwise(free), tuple(free[3:6]), tuple(free[10:22]))
    pictures = [make_picture(i, *size) for i, size in enumerate([(64, 64), (96, 160)])]
    asked: list[tuple[list[list[int] | Picture], dict[str, Any]]] = [
        ([text(20, 0)], {}),
        ([text(20, 0)], ANY),
        ([text(20, 0)], {**ANY, "bad_words": words}),
        ([[4, 5], pictures[1], [9, 8, 7]], {**ANY, "top_k": 20, "top_p": 0.8}),
        ([text(11, 1)], {**ANY, "presence_penalty": 2.0, "frequency_penalty": 0.5, "logprobs": 3}),
        ([text(11, 1)], {"repetition_penalty": 1.7, "logprobs": 0}),
        ([text(5, 2), pictures[0], text(30, 3), pictures[0], [3]], {"frequency_penalty": 1.0}),
        ([text(50, 4)], {**ANY, "logit_bias": ((7, 3.0), (free[0], -100.0)), "min_p": 0.01}),
        ([text(20, 0)], {**ANY, "stop_token_ids": tuple(free[4:12]), "min_tokens": 17}),
        ([text(20, 0)], {**ANY, "stop_token_ids": (free[14],)}),
        ([text(9, 5)], {**ANY, "allowed_token_ids": tuple(range(40, 80)), "logprobs": 1}),
        ([text(9, 6)], {**ANY, "grammar": regex, "ignore_eos": False}),
        ([text(20, 0)], {**ANY, "grammar": regex, "after": free[7], "ignore_eos": False, "presence_penalty": 0.5}),
        ([text(17, 7)], {**ANY, "n": 3}),
        ([text(40, 8)], {"prompt_logprobs": 2, "max_tokens": 5}),
    ]
    for rid, (parts, params) in enumerate(asked):
        engine.add(rid, parts, **{"max_tokens": OUTPUT, "seed": 5, **params})
        engine.step()
    engine.run()


def proposer(known: dict[Key, list[int]], rng: random.Random, share: float) -> Callable[[Request], tuple[int, ...]]:
    def propose(request: Request) -> tuple[int, ...]:
        done = request.num_known - request.num_prompt
        right = known[key_of(request.rid, request.index)][done : done + rng.randrange(MAX_PROPOSED + 1)]
        return tuple(token if rng.random() < share else rng.randrange(300) for token in right)

    return propose


@pytest.fixture(scope="module")
def free(model: Qwen3VL) -> list[int]:
    engine = Engine(model)
    engine.add(0, [text(20, 0)], max_tokens=OUTPUT, seed=5, **ANY)
    return engine.run()[0]


@pytest.fixture(scope="module")
def plain(model: Qwen3VL, regex: bytes, free: list[int]) -> Engine:
    engine = Engine(model, max_num_seqs=17)
    ask_everything(engine, regex, free)
    assert set(engine.tokens[10]) <= set(range(40, 80)), "allowed_token_ids"
    assert free[7] in engine.tokens[12] and len({tuple(tokens) for tokens in engine.tokens.values()}) == 17
    return engine


@pytest.mark.parametrize(
    ("model", "limits", "share"),
    [pytest.param(kind, *case, marks=() if (kind, *case) in IN_GATE else pytest.mark.nightly) for kind in KINDS for case in LIMITS],
    indirect=["model"],
    scope="module",
)
def test_drafts_change_nothing(model: Qwen3VL, regex: bytes, free: list[int], plain: Engine, share: float, limits: dict[str, Any]) -> None:
    engine = Engine(model, max_num_seqs=17, max_num_batched_tokens=256, max_num_mixed_tokens=48, mixed_step_tokens=64, **limits)
    engine.propose = proposer(plain.tokens, random.Random(share), share)
    ask_everything(engine, regex, free)
    assert engine.tokens == plain.tokens and not engine.errors
    for key, expected in plain.logprobs.items():
        assert [item.top_ids for item in engine.logprobs[key]] == [item.top_ids for item in expected]
        assert [item.logprob for item in engine.logprobs[key]] == pytest.approx([item.logprob for item in expected], abs=1e-4)
    assert engine.reports.keys() == plain.reports.keys() == {14}
    assert (engine.core.state.counters.preemptions > 0) == ("num_blocks" in limits)


@in_gate_on("attention")
def test_right_drafts_save_steps(model: Qwen3VL, free: list[int]) -> None:
    engine = Engine(model)
    engine.propose = lambda request: tuple(free[request.num_known - request.num_prompt :][:MAX_PROPOSED])
    engine.add(0, [text(20, 0)], max_tokens=OUTPUT, seed=5, **ANY)
    engine.run()
    assert engine.tokens[0] == free and engine.core.state.num_steps == 1 + -(-(OUTPUT - 1) // (MAX_PROPOSED + 1))


@in_gate_on("Qwen3.5")
def test_a_next_turn_goes_on_from_a_drafted_answer(model: Qwen3VL) -> None:
    turns, plain = [text(40, 20)], Engine(model, prefix_cache=False)
    for turn in range(4):
        plain.add(turn, [turns[-1]], max_tokens=OUTPUT, seed=turn, **ANY)
        answer = plain.run()[turn]
        turns.append([*turns[-1], *answer, *text(5 + turn, 21)] if turn else turns[0])  # the first question comes twice
    engine = Engine(model)
    engine.propose = proposer(plain.tokens, random.Random(3), 0.7)
    for turn in range(4):
        before = engine.core.state.counters.cached_prompt_tokens
        engine.add(turn, [turns[turn]], max_tokens=OUTPUT, seed=turn, **ANY)
        engine.run()
        assert not turn or engine.core.state.counters.cached_prompt_tokens > before
    assert engine.tokens == plain.tokens and engine.core.state.counters.accepted_draft_tokens > 40
