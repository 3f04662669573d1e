"""Requests with and without adapters through a real scheduler core and a real runner: each gets the tokens that it gets alone, with its
adapter merged into the weights."""

from pathlib import Path
from queue import SimpleQueue
from threading import Event
from typing import Any

import pytest

from engine.wire.adapters import AdapterRead, AdapterRef
from engine.worker import adapters as worker_adapters
from engine.worker import graphs
from engine.worker.adapters import WorkerAdapters
from engine.worker.rows import HostStep
from models.decoders.qwen3_vl import Qwen3VL
from models.scaffold import SHAPES, write_model_folder
from tests.eventually import HANG_GUARD_S
from tests.unit.models import adapters
from tests.unit.worker.in_process import TORCH, Engine, load_model, make_picture
from tests.unit.worker.test_graphs import SIZES

MAX_RANK = 16
PICTURE = make_picture(1, 96, 160)
PREFIX = list(range(40, 80))  # longer than two blocks
PROMPTS = ([PREFIX], [PREFIX[:33], PICTURE, [9, 8, 7]], [[3], PICTURE, [5], PICTURE])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapted")
    write_model_folder(folder / "model", SHAPES["tiny"], weights="random", seed=0)
    for i in (1, 2, 3):
        takes = adapters.is_text if i == 3 else lambda _: True
        adapters.write(folder / str(i), folder / "model", i, rank=4 * i, takes=takes, strength=0.5)
    return folder


def ref(folder: Path, number: int) -> AdapterRef | None:
    return AdapterRef(number, f"adapter-{number}", str(folder / str(number)), number != 3) if number else None


@pytest.fixture(scope="module")
def merged(folder: Path) -> list[Qwen3VL]:
    models = [load_model(folder / "model") for _ in range(4)]
    for i, model in enumerate(models[1:], 1):
        adapters.merge_(model, folder / str(i))
    return models


def adapted(folder: Path, num_slots: int, replayed: bool = False, **limits: int) -> Engine:
    model = load_model(folder / "model")
    reports = SimpleQueue[AdapterRead]()
    found = WorkerAdapters(model, TORCH, num_slots, 2, MAX_RANK, None, reports.put)
    return Engine(model, graphs=replayed, sizes=SIZES, slots=found, num_slots=num_slots, adapters_read=reports, **limits)


def alone(models: list[Qwen3VL], number: int, prompt: int) -> list[int]:
    engine = Engine(models[number], sizes=SIZES)
    engine.add(0, PROMPTS[prompt], max_tokens=12)
    return engine.run()[0]


@pytest.mark.parametrize(
    ("num_slots", "replayed", "limits"),
    [(3, True, {}), (1, False, {}), (2, False, {"num_blocks": 14}), (2, True, {"mixed_step_tokens": 25, "max_num_mixed_tokens": 17})],
    ids=["a slot each, graphs", "one slot", "preemption", "chunks, graphs"],
)
def test_each_request_gets_what_its_adapter_gives(
    folder: Path, merged: list[Qwen3VL], monkeypatch: pytest.MonkeyPatch, num_slots: int, replayed: bool, limits: dict[str, int]
) -> None:
    run, kinds = graphs.StepGraphs.run, set()

    def note(self: graphs.StepGraphs, step: HostStep) -> object:
        kinds.add(len(step.adapters) > 0)
        return run(self, step)

    monkeypatch.setattr(graphs.StepGraphs, "run", note)
    engine = adapted(folder, num_slots, replayed, **limits)
    wanted = [(number, prompt) for prompt in range(3) for number in (0, 1, 2, 3, 1)]
    for rid, (number, prompt) in enumerate(wanted):
        engine.add(rid, PROMPTS[prompt], max_tokens=12, adapter=ref(folder, number))
        engine.step()
    tokens = engine.run()
    expected = {pair: alone(merged, *pair) for pair in set(wanted)}
    assert tokens == {rid: expected[pair] for rid, pair in enumerate(wanted)}
    assert len({tuple(each) for each in expected.values()}) > 9, "adapters change nothing"
    assert not replayed or kinds == {False, True}
    assert "num_blocks" not in limits or engine.core.state.counters.preemptions


def test_a_prefix_is_never_used_by_another_adapter(folder: Path) -> None:
    engine = adapted(folder, 3)
    cached = {}
    for rid, number in enumerate((0, 1, 2, 3, 0, 1, 2, 3)):
        before = engine.core.state.counters.cached_prompt_tokens, engine.core.state.counters.images_encoded
        engine.add(rid, PROMPTS[1], max_tokens=2, adapter=ref(folder, number))
        engine.run()
        now = engine.core.state.counters.cached_prompt_tokens, engine.core.state.counters.images_encoded
        cached[rid] = now[0] - before[0] > 0, now[1] - before[1]
    again = (True, 0)
    assert cached == {0: (False, 1), 1: (False, 1), 2: (False, 1), 3: (False, 0), 4: again, 5: again, 6: again, 7: again}


def test_an_adapter_that_cannot_be_read_fails_its_requests_alone(folder: Path, merged: list[Qwen3VL]) -> None:
    engine = adapted(folder, 2)
    lost = AdapterRef(9, "lost", str(folder / "lost"), False)
    for rid, adapter in enumerate((lost, ref(folder, 1), lost, None)):
        engine.add(rid, PROMPTS[0], max_tokens=12, adapter=adapter)
    tokens = engine.run()
    engine.add(4, PROMPTS[0], adapter=lost)
    (refused,) = engine.core.take_outputs(None, 0.0).outputs
    words = "The adapter could not be read: load it again."
    assert engine.errors == {0: words, 2: words} and refused.error is not None and refused.error.message == words
    assert (tokens[1], tokens[3]) == (alone(merged, 1, 0), alone(merged, 0, 0))


def test_no_step_waits_for_an_adapters_files(folder: Path, merged: list[Qwen3VL], monkeypatch: pytest.MonkeyPatch) -> None:
    is_back, read = Event(), worker_adapters.read_adapter

    def slow(path: Path, *others: Any) -> object:
        assert path.name != "2" or is_back.wait(HANG_GUARD_S)
        return read(path, *others)

    monkeypatch.setattr(worker_adapters, "read_adapter", slow)
    engine = adapted(folder, 2)
    engine.awaits_adapters = False
    for rid, number in enumerate((0, 1)):
        engine.add(rid, PROMPTS[0], max_tokens=12, adapter=ref(folder, number))
    while len(engine.tokens[1]) < 2:
        assert engine.step()
    engine.add(2, PROMPTS[0], max_tokens=12, adapter=ref(folder, 2))
    while len(engine.tokens[1]) < 12:
        assert engine.step()
    assert not engine.tokens[2]
    is_back.set()
    assert engine.run() == {number: alone(merged, number, 0) for number in (0, 1, 2)}
