"""Steps through graphs give the tokens of steps without: padding, shapes, copies, with a stand-in for CUDA's capture."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.wire.step_sizes import StepSizes
from engine.worker import graphs
from engine.worker.rows import HostStep
from engine.worker.staging import Staging
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.ops import Experts
from models.kernels.reference.ops import TorchOps
from models.kernels.stream import Normed, RowClass
from models.scaffold import SHAPES, write_model_folder
from tests.unit.worker import in_process
from tests.unit.worker.in_process import Engine, load_model, make_picture, run_again

SIZES = StepSizes(mixed=(26, 50), cheap=26, usual=26, usual_sparse=26, max_mixed_prefill=26, decodes=(1, 2, 4, 8))


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
        seen.add(len(step.gather))
        return run(self, step)

    monkeypatch.setattr(graphs.StepGraphs, "run", note)
    assert load(Engine(model, graphs=True, sizes=SIZES, **limits)) == plain
    assert chunk != 17 or seen >= {1, 3, 4}, "sizes of graphs and between"


def test_pooled_rows_alone_need_no_logits(model: Qwen3VL, monkeypatch: pytest.MonkeyPatch) -> None:
    def pooled(*wanted: tuple[int, ...], streams: int, replayed: bool = False) -> list[torch.Tensor]:
        engine = Engine(model, graphs=replayed, sizes=SIZES)
        with monkeypatch.context() as patch:
            for used in [] if streams else [(Qwen3VL, "logits")]:
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


def test_padding_goes_to_no_expert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model_folder(tmp_path, SHAPES["tiny-moe"], weights="random", seed=0)
    model = load_model(tmp_path)
    limits = {"mixed_step_tokens": 25, "max_num_mixed_tokens": 17, "max_num_batched_tokens": 64}
    plain = load(Engine(model, sizes=SIZES, **limits))
    run, compute = graphs.StepGraphs.run, TorchOps.sparse_swiglu
    given = []
    padded = []

    def noted(self: TorchOps, x: Normed, experts: Experts, rows: RowClass, real: torch.Tensor | None) -> torch.Tensor:
        num_tokens = len(x.stream_TD)
        given.append((num_tokens if real is None else int(real.sum()), num_tokens))
        return compute(self, x, experts, rows, real)

    def note(self: graphs.StepGraphs, step: HostStep) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchOps, "sparse_swiglu", noted)
            given.clear()
            result = run(self, step)
        *layers, (last, _) = given
        assert {real for real, _ in layers} == {len(step.gather)} == {last}
        padded.append(any(real < total for real, total in layers))
        return result

    monkeypatch.setattr(graphs.StepGraphs, "run", note)
    assert load(Engine(model, graphs=True, sizes=SIZES, **limits)) == plain and any(padded) and not all(padded)


class Launches(TorchDispatchMode):
    """Names of launches on a GPU, without views and what happens inside a replay."""

    def __init__(self) -> None:
        super().__init__()
        self.names = []
        self._in_replay = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> object:
        if not func.is_view and not self._in_replay:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def record(self, forward: Callable[[], torch.Tensor]) -> tuple[Callable[[], object], torch.Tensor]:
        replay, result = run_again(forward)

        def noted() -> None:
            self.names.append("replay")
            self._in_replay = True
            replay()
            self._in_replay = False

        return noted, result


def test_little_is_launched_beside_a_graph(model: Qwen3VL, monkeypatch: pytest.MonkeyPatch) -> None:
    launches, copy = Launches(), Staging.copy

    def note(self: Staging) -> None:
        launches.names.append("copy")
        copy(self)

    monkeypatch.setattr(in_process, "run_again", launches.record)
    monkeypatch.setattr(Staging, "copy", note)
    engine = Engine(model, graphs=True, sizes=SIZES, max_num_mixed_tokens=24, mixed_step_tokens=32, max_num_batched_tokens=40)
    launches.names.clear()

    def step() -> list[str]:
        with launches:
            engine.step()
        names, launches.names = launches.names, []
        return names

    sample = ["argmax", "index_copy_"]
    engine.add(0, [list(range(20))])
    engine.add(1, [[6] * 3, make_picture(0, 64, 64), [7]])
    while (names := step())[-2:] != sample or "replay" not in names:
        assert "replay" not in names
    assert names == step() == ["copy", "replay", "copy", *sample]
    engine.propose = lambda request: (7, 8) if request.rid else ()
    verify = ["ne", "cumsum", "sub", "index", "eq", "__and__", "where"]
    assert step() == ["copy", "index_put_", "replay", "copy", "index", "argmax", *verify, "index_copy_", "where"]
