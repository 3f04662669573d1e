"""Weight updates while requests come and go, in the engine without its processes: real core, real runner, graphs replayed."""

from pathlib import Path

import pytest
import torch

from engine.scheduler.updates import UpdateControl
from engine.wire.updates import FromFolder, Order, OrderDone, OrderResult
from models.scaffold import SHAPES, write_model_folder
from tests.unit.models.test_updates import alter, update
from tests.unit.worker.in_process import Engine, load_model
from tests.unit.worker.test_graphs import SIZES
from tests.unit.worker.test_steps import prompts


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("updates")
    write_model_folder(folder / "first", SHAPES["tiny"], weights="random", seed=0)
    return folder / "first", alter(folder / "first", folder / "second")


def exchange(engine: Engine, folder: Path, aborts: bool) -> None:
    """Update from a folder as scheduler and worker do."""
    done: list[OrderDone] = []

    def work(order: Order) -> None:
        update(engine._runner.model, folder)
        states.append(OrderResult())

    states: list[OrderResult] = []
    control = UpdateControl(engine.core, 1, work, done.append)
    control.take(Order(0, FromFolder(""), aborts))
    while not done:
        while engine.step():
            pass
        control.advance()
        while states:
            control.take(states.pop())


@torch.inference_mode()
def test_tokens_after_an_update_are_those_of_a_fresh_engine(folders: tuple[Path, Path]) -> None:
    """Neither cached prefixes nor embeddings of previous weights are used."""
    expected = []
    for folder in folders:
        engine = Engine(load_model(folder))
        for rid, prompt in enumerate(prompts()):
            engine.add(rid, prompt)
        expected.append(engine.run())
    assert expected[0] != expected[1]
    engine = Engine(load_model(folders[0]), graphs=True, sizes=SIZES)
    for number, folder in enumerate((folders[0], folders[1], folders[0], folders[1])):
        exchange(engine, folder, aborts=False)
        for rid, prompt in enumerate(prompts()):
            engine.add(10 * number + rid, prompt)
        engine.run()
        assert [engine.tokens[10 * number + rid] for rid in range(len(prompts()))] == list(expected[number % 2].values())
