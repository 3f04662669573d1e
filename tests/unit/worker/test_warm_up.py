"""What is run before the first request: steps in free blocks, whose results decide whether layers are repeated."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.worker import warm_up
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.captured import LaunchFailed
from tests.unit.worker.in_process import Engine


@pytest.mark.parametrize("error", [0.0, 0.5, float("nan"), LaunchFailed("a test")])
def test_layers_are_repeated_only_if_they_compute_the_same(
    model: Qwen3VL, monkeypatch: pytest.MonkeyPatch, error: float | LaunchFailed
) -> None:
    engine, streams = Engine(model), ["own"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    compute, sizes = warm_up.hidden_of, list[int]()

    def noted(runner: Any, step: Any) -> torch.Tensor:
        sizes.append(step.positions.shape[1])
        if streams[-1] == "default":
            return compute(runner, step)
        if isinstance(error, LaunchFailed):
            raise error
        return compute(runner, step) * (1 + error)

    monkeypatch.setattr(warm_up, "hidden_of", noted)
    monkeypatch.setattr(warm_up, "SMALL", (1,))
    warm_up.warm_up_steps(engine._runner, [20, 60, 100_000])
    assert streams[-1] == ("default" if error else "own") and sizes == [1, 1, 20, 20, 60, 60][: 2 if error else 6]
    engine.add(0, [list(range(40))])
    other = Engine(model)
    other.add(0, [list(range(40))])
    assert engine.run() == other.run(), "requests do not see these steps"


def test_adapted_tokens_are_warmed_up_too(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: Any = SimpleNamespace(block_size=16, scratch_row=8)
    assert [len(warm_up.step_of(rows, 20, has_adapters).adapters) for has_adapters in (False, True)] == [0, 20]
