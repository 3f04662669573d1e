"""Answers that follow a grammar: real requests on the demo model's tokenizer with random weights, so that only the grammar makes sense."""

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from engine.grammar.compile import compiled as compile_grammar
from engine.wire.child import StopFlag
from engine.wire.grammar import CompiledGrammar, Grammar
from engine.wire.messages import Admit, Region, SamplingParams
from engine.worker.main import IDLE_POLL_S, PAUSE_S, run
from engine.worker.masks import AFTER_S, BROKEN, BUSY, MAX_STUCK, STEP_S, TOKEN_S, TOO_SLOW, MaskThread, Session, TokenRules, fill_masks
from engine.worker.sampling.samples import SampleTable
from engine.worker.stopwatch import Stopwatch
from models.checkpoint.load import init_dummy_weights
from models.decoders.qwen3_vl import Qwen3VL
from models.demo import CHECKPOINT
from tests.eventually import eventually
from tests.unit.engine.test_grammar_compile import COMPILER, refusal
from tests.unit.worker.in_process import Engine, load_model

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 10, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["name", "n", "ok"],
    "additionalProperties": False,
}
REGEX = r"[a-f]{3}-[0-9]{2,4}!"
GRAMMARS = {
    "schema": Grammar("json_schema", json.dumps(SCHEMA)),
    "regex": Grammar("regex", REGEX),
    "choice": Grammar("ebnf", 'root ::= "a \\"b\\"" | "c\\n" | "ü"'),
    "ebnf": Grammar("ebnf", 'root ::= ("ab" | "ba")+ "."'),
}
PARAMS: dict[str, Any] = {"temperature": 1.0, "ignore_eos": False, "max_tokens": 60}


@pytest.fixture(scope="module")
def compiled() -> dict[str, bytes]:
    return {name: compile_grammar(COMPILER, grammar).data for name, grammar in GRAMMARS.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> Iterator[Qwen3VL]:
    made_up = load_model(CHECKPOINT)
    init_dummy_weights(made_up, seed=0)
    yield made_up


def text_of(tokenizer: Tokenizer, model: Qwen3VL, tokens: list[int]) -> str:
    assert tokens[-1] in model.config.eos_token_ids
    return tokenizer.decode(tokens[:-1], skip_special_tokens=False)


def follows(name: str, text: str) -> bool:
    if name == "schema":
        value = json.loads(text)
        assert text == json.dumps(value, separators=(",", ":")) and value["name"] in ("red", "blue") and 10 <= value["n"] <= 99
        return list(value) == ["name", "n", "ok"] and isinstance(value["ok"], bool)
    if name == "choice":
        return text in ('a "b"', "c\n", "ü")
    return re.fullmatch(REGEX if name == "regex" else r"(ab|ba)+\.", text) is not None


@pytest.mark.parametrize("num_blocks", [256, 6])
def test_answers_follow_their_grammars(model: Qwen3VL, tokenizer: Tokenizer, compiled: dict[str, bytes], num_blocks: int) -> None:
    engine, plain = Engine(model, num_blocks=num_blocks, prefix_cache=False), Engine(model)
    names = [*GRAMMARS] * 2
    for rid, name in enumerate(names):
        engine.add(rid, [[rid, 2, 3]], grammar=compiled[name], seed=rid, **PARAMS)
        other = {**PARAMS, "ignore_eos": True, "seed": rid, "max_tokens": 30}
        engine.add(100 + rid, [[rid, 4]], **other)
        plain.add(100 + rid, [[rid, 4]], **other)
    tokens, free = engine.run(), plain.run()
    assert {rid: tokens[rid] for rid in free} == free
    assert (engine.core.state.counters.preemptions > 0) == (num_blocks == 6)
    for rid, name in enumerate(names):
        assert follows(name, text_of(tokenizer, model, tokens[rid])), (name, tokens[rid])
    alone = Engine(model)
    alone.add(1, [[1, 2, 3]], grammar=compiled[names[1]], seed=1, **PARAMS)
    assert alone.run()[1] == tokens[1]


class StuckSession(Session):
    may_end = threading.Event()

    def fill(self) -> None:
        threading.current_thread().is_stuck = True  # type: ignore[attr-defined]
        assert self.may_end.wait(60)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[MaskThread]]:
    """CPU time by thread: a millisecond more with each look at one that is stuck."""
    times: Counter[MaskThread] = Counter()

    def cpu_time(thread: MaskThread) -> float:
        times[thread] += hasattr(thread, "is_stuck")
        return times[thread] / 1e3

    monkeypatch.setattr(MaskThread, "cpu_time", cpu_time)
    monkeypatch.setattr(StuckSession, "may_end", threading.Event())
    yield times
    StuckSession.may_end.set()
    eventually(lambda: not any(thread.is_alive() for thread in times if hasattr(thread, "is_stuck")), "the end of abandoned threads")


def test_a_grammar_that_takes_too_long_ends_its_request_only(
    model: Qwen3VL, tokenizer: Tokenizer, compiled: dict[str, bytes], clock: Counter[MaskThread]
) -> None:
    engine, plain = Engine(model), Engine(model)
    for made in (engine, plain):
        made.add(1, [[1, 4]], **PARAMS | {"ignore_eos": True, "max_tokens": 20})
    for rid in (0, 2):
        engine.add(rid, [[0, 2, 3]], grammar=compiled["schema"], **PARAMS)
    for _ in range(3):
        engine.step()
    sessions = engine._runner.sampler.rules._sessions
    row = next(iter(sessions))
    sessions[row] = StuckSession(sessions[row].matcher)
    engine.run()
    assert "too long to evaluate" in engine.errors[0] and engine.errors.keys() == {0}
    assert engine.tokens[1] == plain.run()[1] and follows("schema", text_of(tokenizer, model, engine.tokens[2]))


def test_time_of_masks_is_limited_per_step(clock: Counter[MaskThread]) -> None:
    stuck: list[MaskThread] = []
    found = [StuckSession() for _ in range(16)]
    fill_masks(found, stuck)
    assert [session.error for session in found] == [TOO_SLOW] * 16
    assert 1e3 * STEP_S <= sum(clock.values()) <= 1e3 * (STEP_S + 16 * (AFTER_S + 2 * TOKEN_S))
    found = [StuckSession() for _ in range(MAX_STUCK)]
    fill_masks(found, stuck)
    assert [session.error for session in found] == [TOO_SLOW] * (MAX_STUCK - 16) + [BUSY] * 16


def test_thoughts_come_first(model: Qwen3VL, tokenizer: Tokenizer, compiled: dict[str, bytes]) -> None:
    engine, free = Engine(model), Engine(model)
    free.add(0, [[5]], **PARAMS, seed=3)
    marker = next(token for token in free.run()[0][4:] if token not in model.config.eos_token_ids)
    engine.add(0, [[5]], grammar=compiled["regex"], after=marker, **PARAMS, seed=3)
    tokens = engine.run()[0]
    start = tokens.index(marker) + 1
    assert tokens[:start] == free.tokens[0][:start]
    assert follows("regex", text_of(tokenizer, model, tokens[start:]))


def test_a_thinking_budget(model: Qwen3VL, tokenizer: Tokenizer, compiled: dict[str, bytes]) -> None:
    """Red if a preemption changes it, or if it has an effect on an answer without thoughts."""
    engine, plain = Engine(model, num_blocks=6, prefix_cache=False), Engine(model)
    free = {**PARAMS, "ignore_eos": True, "max_tokens": 40}
    for rid in range(4):
        plain.add(rid, [[rid, 2]], seed=rid, **free)
    others = plain.run()
    end = min(set(range(100)) - {token for tokens in others.values() for token in tokens})
    for rid, (budget, ids) in enumerate(((3, (end,)), (0, (end,)), (3, (others[2][0], end)), (3, (end, end)))):
        engine.add(rid, [[rid, 2]], seed=rid, thinking_token_budget=budget, think_ids=ids, **free)
    engine.add(4, [[5]], grammar=compiled["regex"], after=end, thinking_token_budget=2, think_ids=(end,), **PARAMS)
    tokens = engine.run()
    assert engine.core.state.counters.preemptions > 0
    assert [tokens[rid][: num + 1] for rid, num in enumerate((3, 0, 4))] == [[*others[rid][:num], end] for rid, num in enumerate((3, 0, 4))]
    assert tokens[3] == others[3]
    assert end in tokens[4][:3] and follows("regex", text_of(tokenizer, model, tokens[4][tokens[4].index(end) + 1 :]))


def test_a_thinking_budget_that_ends_among_drafts() -> None:
    session = Session(None, 9, [7], left=2, proposed=(5, 9, 6))
    session.words = np.full((4, 1), -1, dtype=np.int32)
    session.fill()
    assert session.words[:, 0].tolist() == [-1, 1 << 9, -1, -1]
    assert (session.after, session.left) == (9, 1)


def test_a_step_without_grammars_waits_for_nothing(model: Qwen3VL, compiled: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []
    take = TokenRules._take
    monkeypatch.setattr(TokenRules, "_take", lambda self, sampled: (taken.append(sampled), take(self, sampled)))
    engine = Engine(model)
    engine.add(0, [[5]], **PARAMS)
    engine.add(1, [[6]], allowed_token_ids=(5, 6), **PARAMS)
    engine.run()
    assert not taken
    engine.add(2, [[5]], grammar=compiled["regex"], **PARAMS)
    engine.run()
    assert taken


def test_a_worker_without_work_for_a_second_loads_the_library() -> None:
    messages, waits, loads, stopping = ["x", None, None], list[float](), list[int](), StopFlag()

    def recv(timeout: float, spin: float) -> str | None:
        waits.append(timeout)
        if len(waits) == len(messages):
            stopping.set()
        return messages[len(waits) - 1]

    rules = SimpleNamespace(load_early=lambda: loads.append(len(waits)))
    runner: Any = SimpleNamespace(use_spare_time=lambda is_busy: False, sampler=SimpleNamespace(rules=rules))
    plans: Any = SimpleNamespace(recv=recv)
    run(runner, {str: lambda message: None}, plans, Any, stopping)  # type: ignore[arg-type, dict-item]
    assert waits == [IDLE_POLL_S, PAUSE_S, IDLE_POLL_S] and loads == [3]


DEEP = '{"items":' * 100_000 + "{}" + "}" * 100_000


def test_wrong_grammars_are_refused() -> None:
    wrong = [("json_schema", "{"), ("json_schema", '{"type":"x"}'), ("regex", "(["), ("ebnf", "root ::= (")]
    for kind, text in [*wrong, ("structural_tag", "{}"), ("json_schema", DEEP)]:
        reason = refusal(kind, text)
        assert reason and len(reason) <= 200 and "/" not in reason and ".cc" not in reason and ".h" not in reason, (kind, reason)


def test_a_damaged_grammar_ends_its_request_only(compiled: dict[str, bytes]) -> None:
    rules, table = TokenRules(CHECKPOINT, 4, 768, torch.device("cpu")), SampleTable(2, 0)
    samples = table.samples(np.array([0, 1]), np.array([1, 1]))
    for row, data in enumerate((b"damaged", compiled["schema"])):
        arena: Any = SimpleNamespace(view=lambda offset, length, data=data: data)
        rules.admit(Admit(row, Region(0, 0, 1), [], [], [], SamplingParams(), CompiledGrammar(Region(0, 0, len(data)))), arena)
    masks = rules.masks(samples, Stopwatch(on_gpu=False))
    assert masks is not None and masks[0].tolist() == [1]
    assert rules.note(samples, torch.zeros(2, dtype=torch.int64), Stopwatch(on_gpu=False)) == {0: BROKEN}
