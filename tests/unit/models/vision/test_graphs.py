"""Where graphs of the tower are captured, with CUDA's objects replaced; that they compute the same as the tower is tested on GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from models.geometry import Grid
from models.qwen3_vl import Qwen3VL
from models.vision.graphs import SIGHTINGS, TowerGraphs
from models.vision.tower import VisionTower
from tests.unit.models.harness import noise_image

NUM_STREAMS = 32  # that torch hands out in turn


class Cuda:
    """Streams by number, and the stream that each capture began on."""

    def __init__(self) -> None:
        self.num_made = 0
        self.current: list[int] = [-1]
        self.captured_on: list[int] = []
        self.num_ended = 0

    def make_stream(self) -> SimpleNamespace:
        self.num_made += 1
        return SimpleNamespace(number=(self.num_made - 1) % NUM_STREAMS, wait_stream=lambda other: None)

    def make_graph(self) -> SimpleNamespace:
        def begin(pool: object, capture_error_mode: str) -> None:
            self.captured_on.append(self.current[-1])

        def end() -> None:
            self.num_ended += 1

        return SimpleNamespace(capture_begin=begin, capture_end=end, replay=lambda: None)

    @contextmanager
    def on(self, stream: SimpleNamespace) -> Iterator[None]:
        self.current.append(stream.number)
        try:
            yield
        finally:
            self.current.pop()


class Tower:
    """As much of it as is captured."""

    def __call__(self, patches_FPX: torch.Tensor, grids: object) -> torch.Tensor:
        return patches_FPX

    def tables(self, grids: object) -> None:
        return None

    def plan(self, grids: object) -> None:
        return None

    def empty_patches(self, grids: Sequence[Grid], num_frames: int) -> torch.Tensor:
        return torch.zeros(num_frames, sum(t * h * w for t, h, w in grids), 1)

    def compute(self, patches_FPX: torch.Tensor, tables: object) -> torch.Tensor:
        return patches_FPX


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", cuda.make_stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", cuda.make_graph)
    monkeypatch.setattr(torch.cuda, "stream", cuda.on)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: cuda.make_stream())
    return cuda


def test_all_captures_are_on_one_stream(cuda: Cuda) -> None:
    """Red if a capture can meet the stream of another owner's graphs: both would keep one cuBLAS workspace and write to it at once."""
    graphs = TowerGraphs(Tower())  # type: ignore[arg-type]
    for i in range(1, 2 * NUM_STREAMS):
        for _ in range(SIGHTINGS):
            graphs.replay(torch.zeros(1, 4 * i, 1), [(1, 2, 2 * i)])
        assert graphs.capture_one()
    assert len(set(cuda.captured_on)) == 1 and -1 not in cuda.captured_on


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError, RuntimeError])
def test_a_capture_without_memory_is_given_up(cuda: Cuda, monkeypatch: pytest.MonkeyPatch, problem: type[Exception]) -> None:
    """Red if what only saves time ends the worker, leaves a stream in the middle of a capture, or is tried for ever."""
    tower = Tower()
    graphs = TowerGraphs(tower)  # type: ignore[arg-type]

    def fail(patches_FPX: torch.Tensor, tables: object) -> torch.Tensor:
        raise problem

    monkeypatch.setattr(tower, "compute", fail)
    for _ in range(SIGHTINGS):
        graphs.replay(torch.zeros(1, 4, 1), [(1, 2, 2)])
    assert graphs.capture_one() and cuda.num_ended == 1 and cuda.current == [-1]
    assert not graphs.capture_one() and graphs.replay(torch.zeros(1, 4, 1), [(1, 2, 2)]) is None


def test_a_pair_has_a_graph_of_its_own(cuda: Cuda) -> None:
    """Red if an image and a frame pair of one grid share a graph: it would read one frame of the two."""
    graphs = TowerGraphs(Tower())  # type: ignore[arg-type]
    for num_frames in (1, 2):
        for _ in range(SIGHTINGS):
            graphs.replay(torch.zeros(num_frames, 4, 1), [(1, 2, 2)])
        assert graphs.capture_one()
        levels = graphs.replay(torch.zeros(num_frames, 4, 1), [(1, 2, 2)])
        assert levels is not None and len(levels) == num_frames


class Replayed:
    """A graph of any encode: its result lies at one address, which the next replay overwrites."""

    def __init__(self, tower: VisionTower) -> None:
        self.tower, self.levels = tower, torch.empty(0)

    def replay(self, patches_FPX: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor:
        self.levels: torch.Tensor = self.tower(patches_FPX, grids)
        return self.levels


@pytest.mark.parametrize("count", [1, 3])
@torch.inference_mode()
def test_replayed_embeddings_are_the_callers_own(tiny: Qwen3VL, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The engine caches and evicts each image alone. Red if an embedding is overwritten by the next replay, or keeps others' memory."""
    images, grids = [noise_image(64, 96, seed=i) for i in range(count)], [(1, 4, 6)] * count
    expected, graph = tiny.encode(images, grids), Replayed(tiny.visual)
    monkeypatch.setattr(tiny, "_graphs", graph)
    ours = tiny.encode(images, grids)
    graph.levels.zero_()
    for got, wanted in zip(ours, expected, strict=True):
        assert got.equal(wanted) and got.is_contiguous()
        assert got.untyped_storage().nbytes() == wanted.untyped_storage().nbytes() == got.nbytes
