"""Steps through graphs give the tokens of steps without: padding, shapes and what is copied where, with a stand-in for CUDA's capture."""

import pytest
import torch

from engine.worker import graphs
from engine.worker.rows import HostStep, Rows
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.step_sizes import StepSizes
from tests.unit.worker.in_process import Engine, make_picture

# Few and small shapes, so that prompts of a tiny model meet every case: below, at and above a size.
SIZES = StepSizes(
    mixed=(26, 50),
    cheap=26,
    usual=26,
    usual_sparse=26,
    max_mixed_prefill=26,
    decodes=(1, 2, 4, 8),
    mixed_decodes=(0, 2, 4, 8),
    small_chunks=(12,),
    largest_chunk=40,
    few_decodes=2,
    largest_prompt=60,
)


@pytest.fixture(autouse=True)
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_PREFILL_ROWS", 3)


def load(engine: Engine) -> dict[int, list[int]]:
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


@pytest.mark.parametrize("chunk", [17, *(pytest.param(size, marks=pytest.mark.nightly) for size in (5, 12, 24, 64))])
def test_graphs_change_nothing(model: Qwen3VL, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    limits = {"mixed_step_tokens": chunk + 8, "max_num_mixed_tokens": chunk, "max_num_batched_tokens": 64}
    plain = load(Engine(model, sizes=SIZES, **limits))
    run, seen = graphs.StepGraphs.run, set()

    def note(self: graphs.StepGraphs, step: HostStep) -> object:
        seen.add((min(step.attention.num_prefill_rows, 2), len(step.gather) > 0, len(step.visual) > 0))
        return run(self, step)

    monkeypatch.setattr(graphs.StepGraphs, "run", note)
    assert load(Engine(model, graphs=True, sizes=SIZES, **limits)) == plain
    assert chunk != 17 or seen >= {(0, True, False), (1, True, True), (1, False, False), (2, True, True)}, "every kind of step"


def test_pooled_rows_are_replayed(model: Qwen3VL, monkeypatch: pytest.MonkeyPatch) -> None:
    def pooled(*wanted: tuple[int, ...], streams: int, replayed: bool = False) -> list[torch.Tensor]:
        engine = Engine(model, graphs=replayed, sizes=SIZES)
        with monkeypatch.context() as patch:
            for used in [(Rows, "stage")] if replayed else [(Qwen3VL, "logits")] if not streams else []:
                patch.setattr(*used, None)
            for rid in range(streams):
                engine.add(rid, [[9] * 7], max_tokens=6)
                engine.step()
            for rid, ids in enumerate(wanted, streams):
                engine.add(rid, [list(range(rid, 10 + 10 * rid))], max_tokens=1, pooled_ids=ids)
            engine.run()
        return [torch.frombuffer(bytearray(report.values), dtype=torch.float32) for _, report in sorted(engine.reports.items())]

    expected = pooled((), (5, 7), (), streams=1)
    assert [len(values) for values in expected] == [model.config.text.hidden_size, 2, model.config.text.hidden_size]
    found = pooled((), (5, 7), (), streams=1, replayed=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)  # a step of a graph is padded: some CPUs then round differently
    assert len(pooled((), (), streams=0)) == 2
