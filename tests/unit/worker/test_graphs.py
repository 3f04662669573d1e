"""Steps through graphs give the tokens of steps without: padding, shapes and what is copied where, with a stand-in for CUDA's capture."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.worker import graphs
from engine.worker.rows import StepInputs
from models.qwen3_vl import Qwen3VL
from models.scaffold import SHAPES, write_model_folder
from tests.unit.worker.in_process import Engine, load_model, make_picture


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Qwen3VL]:
    folder: Path = tmp_path_factory.mktemp("tiny")
    write_model_folder(folder, SHAPES["tiny"], weights="random", seed=0)
    yield load_model(folder)


@pytest.fixture(autouse=True)
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, so that prompts of a tiny model meet every case: below, at and above a size."""
    monkeypatch.setattr(graphs, "chunk_sizes", lambda rows: [12, 26 - rows, 40])
    monkeypatch.setattr(graphs, "LARGEST_CHUNK", 40)
    monkeypatch.setattr(graphs, "MIXED_DECODE_SIZES", (2, 4, 8))
    monkeypatch.setattr(graphs, "DECODE_SIZES", (1, 2, 4, 8))
    monkeypatch.setattr(graphs, "MAX_PREFILL_ROWS", 3)


def load(engine: Engine) -> dict[int, list[int]]:
    """Requests that come while others decode: text, pictures (one twice), a prompt longer than any graph, ends at different times."""
    pictures = [make_picture(i, *size) for i, size in enumerate([(64, 64), (96, 160), (160, 96)])]
    prompts = [
        [list(range(50))],
        [[4, 5], pictures[1], [9, 8, 7]],
        [[1], pictures[0], [2], pictures[2], [3], pictures[0]],
        [list(range(100, 111))],
        [list(range(200, 212))],
        [[6] * 3, pictures[2]],
        [list(range(20))],
    ]
    for rid, prompt in enumerate(prompts):
        engine.add(rid, prompt, max_tokens=5 + 3 * (rid % 3), seed=rid, temperature=0.8 * (rid % 2))
        engine.step()
        engine.step()
    return engine.run()


@pytest.mark.parametrize("chunk", [5, 12, 17, 24, 64])
def test_graphs_change_nothing(model: Qwen3VL, chunk: int) -> None:
    """Red if padding is seen by anybody, if a graph reads a stale row, position, slot or image, or if logits are in a wrong order."""
    plain, graphed = (
        load(Engine(model, graphs=with_graphs, mixed_step_tokens=chunk + 8, max_num_mixed_tokens=chunk, max_num_batched_tokens=64))
        for with_graphs in (False, True)
    )
    assert graphed == plain


def test_every_kind_of_step_goes_through_a_graph(model: Qwen3VL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if the test above stops to exercise graphs: with prompts and decodes, several prompts, prompts alone, decodes alone."""
    seen = set()

    def note(self: graphs.StepGraphs, inputs: StepInputs) -> object:
        rows = inputs.batch.attention.num_prefill_rows
        seen.add((min(rows, 2), len(inputs.decode_rows) > 0, len(inputs.batch.visual) > 0))
        return run(self, inputs)

    run = graphs.StepGraphs.run
    monkeypatch.setattr(graphs.StepGraphs, "run", note)
    load(Engine(model, graphs=True, mixed_step_tokens=32, max_num_mixed_tokens=24, max_num_batched_tokens=40))
    assert seen >= {(0, True, False), (1, True, True), (1, False, False), (2, True, True)}
