"""Where graphs of the tower are captured, with CUDA's objects replaced; that they compute the same as the tower is tested on GPUs."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from models.geometry import Grid
from models.vision.graphs import SIGHTINGS, TowerGraphs

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
            graphs(torch.zeros(1, 4 * i, 1), [(1, 2, 2 * i)])
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
        graphs(torch.zeros(1, 4, 1), [(1, 2, 2)])
    assert graphs.capture_one() and cuda.num_ended == 1 and cuda.current == [-1]
    assert not graphs.capture_one() and graphs(torch.zeros(1, 4, 1), [(1, 2, 2)]).shape[1] == 4


def test_a_pair_has_a_graph_of_its_own(cuda: Cuda) -> None:
    """Red if an image and a frame pair of one grid share a graph: it would read one frame of the two."""
    graphs = TowerGraphs(Tower())  # type: ignore[arg-type]
    for num_frames in (1, 2):
        for _ in range(SIGHTINGS):
            graphs(torch.zeros(num_frames, 4, 1), [(1, 2, 2)])
        assert graphs.capture_one()
        assert len(graphs(torch.zeros(num_frames, 4, 1), [(1, 2, 2)])) == num_frames
