"""Routing of dummy weights, and the counter of `bench profile --experts`."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.experts import ExpertCounter
from models.checkpoint.load import init_dummy_weights
from models.config.huggingface import read_config
from models.layers.moe import SparseMoe
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from models.scaffold.shapes import Experts
from tests.unit.models import harness
from tests.unit.models.harness import PagedRunner, Prompt, make


@pytest.mark.parametrize("name", ["tiny-moe", "3.5-tiny-moe"])
def test_dummy_routers_choose_almost_uniformly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """64 random tokens, as one prompt and as the decode rows of a step, choose as many experts in each layer as independent ones."""
    tiny = SHAPES[name]
    assert tiny.experts is not None
    shape = replace(tiny, layers=12, experts=Experts(256, 4, 256, tiny.experts.shared))
    write_model_folder(tmp_path, shape, weights="none", seed=0)
    model = make(read_config(tmp_path), TensorParallel.single())
    init_dummy_weights(model, seed=0)
    monkeypatch.setattr(SparseMoe, "add_", SparseMoe.add_)  # restored after the test
    counter = ExpertCounter()
    counter.watch()
    ids = torch.randint(3000, (64,), generator=torch.Generator().manual_seed(1)).tolist()
    monkeypatch.setattr(harness, "MAX_ROWS", len(ids))
    runner = PagedRunner(model)
    for prompts, num_prefill_rows in (([ids], 1), ([[each] for each in ids], 0)):
        counter.reset()
        rows = [(runner.start(Prompt.build(model.config, [prompt])), len(prompt)) for prompt in prompts]
        runner.step(rows, num_prefill_rows, want="all")
        assert len(counter.layers()) == shape.layers
        for distinct, expected in counter.layers():
            assert expected == pytest.approx(256 * (1 - (1 - 4 / 256) ** 64)) and distinct == pytest.approx(expected, rel=0.1)
