"""Which encodes get a graph: the policy of `TowerGraphs` without CUDA. Captured graphs are tested on GPUs."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from models.decoders.qwen3_vl import Qwen3VL
from models.media.geometry import Grid
from models.vision import graphs as module
from models.vision.graphs import MAX_PATCHES_OF_ONE, SIGHTINGS, SIGHTINGS_WHEN_BUSY, Key, TowerGraph, TowerGraphs
from tests.unit.models.harness import noise_image


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> TowerGraphs:
    monkeypatch.setattr(module, "torch", SimpleNamespace(cuda=SimpleNamespace(graph_pool_handle=int, Stream=int)))
    made = TowerGraphs(cast(Any, SimpleNamespace(plan=lambda grids: None)))

    def capture(key: Key) -> TowerGraph:
        frames, grids = key
        patches = torch.zeros(frames, sum(t * h * w for t, h, w in grids), 1)
        return TowerGraph(cast(Any, SimpleNamespace(replay=lambda: None)), patches, cast(Any, None), torch.tensor(patches.shape[:2]))

    monkeypatch.setattr(made, "_capture", capture)
    return made


def replay(graphs: TowerGraphs, frames: int, patches: int) -> list[int] | None:
    levels = graphs.replay(torch.zeros(frames, patches, 1), [(1, 1, patches)])
    return None if levels is None else levels.tolist()


def test_what_was_seen_often_has_a_graph_of_its_own(graphs: TowerGraphs) -> None:
    for count in range(1, SIGHTINGS_WHEN_BUSY + 1):
        assert replay(graphs, 1, 4) is None
        assert count >= SIGHTINGS or not graphs.capture_one()
        assert graphs.capture_one(is_busy=True) == (count == SIGHTINGS_WHEN_BUSY)
    assert replay(graphs, 1, 4) == [1, 4] and replay(graphs, 2, 4) is None
    assert not graphs.capture_one()
    assert replay(graphs, 2, 4) is None and graphs.capture_one()
    assert replay(graphs, 2, 4) == [2, 4] and replay(graphs, 1, 4) == [1, 4]


def test_graphs_are_bounded(graphs: TowerGraphs) -> None:
    for size in (MAX_PATCHES_OF_ONE + 1, *range(MAX_PATCHES_OF_ONE - 4, MAX_PATCHES_OF_ONE + 1)):
        for _ in range(SIGHTINGS):
            assert replay(graphs, 1, size) is None
        assert graphs.capture_one() == (size <= MAX_PATCHES_OF_ONE)
    assert replay(graphs, 1, MAX_PATCHES_OF_ONE) and replay(graphs, 1, MAX_PATCHES_OF_ONE - 4) is None


@pytest.mark.parametrize("count", [1, 3])
@torch.inference_mode()
def test_replayed_embeddings_are_the_callers_own(tiny: Qwen3VL, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    images, grids = [noise_image(64, 96, seed=i) for i in range(count)], [(1, 4, 6)] * count
    expected, shared = tiny.tower.encode(images, grids), torch.empty(0)

    def replay(patches_FPX: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        nonlocal shared
        shared = tiny.visual(patches_FPX, grids)
        return shared

    monkeypatch.setattr(tiny.tower, "_graphs", SimpleNamespace(replay=replay))
    ours = tiny.tower.encode(images, grids)
    shared.zero_()
    for got, wanted in zip(ours, expected, strict=True):
        assert got.equal(wanted) and got.is_contiguous()
        assert got.untyped_storage().nbytes() == wanted.untyped_storage().nbytes() == got.nbytes
