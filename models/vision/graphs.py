"""CUDA graphs of small encodes whose exact list of grids repeats: one launch instead of three hundred. They are captured while the worker
has nothing to launch."""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.media.geometry import Grid
from models.vision.tables import Tables
from models.vision.tower import VisionTower

logger = logging.getLogger(__name__)

MAX_PATCHES_OF_ONE = 8192  # with more, the device is slower than the host
MAX_PATCHES_OF_ALL = 32_768  # inputs and outputs take about 10 kB per patch at 8B
SIGHTINGS = 2  # encodes before a graph is captured
SIGHTINGS_WHEN_BUSY = 6  # a capture takes longer than a step and delays running streams
MAX_SEEN = 256
KEPT_SHARE = 3  # inputs and outputs of a graph take less than a third of its activations

Key = tuple[int, tuple[Grid, ...]]  # frames, grids


@dataclass(frozen=True, slots=True)
class TowerGraph:
    """One captured encode. It reads `patches_FPX` and `tables` and writes `levels`, all at fixed addresses."""

    graph: torch.cuda.CUDAGraph
    patches_FPX: torch.Tensor
    tables: Tables
    levels: torch.Tensor


class TowerGraphs:
    def __init__(self, tower: VisionTower) -> None:
        self._tower = tower
        self._graphs: OrderedDict[Key, TowerGraph] = OrderedDict()
        self._seen: OrderedDict[Key, int] = OrderedDict()
        self._pool = torch.cuda.graph_pool_handle()
        # One stream for all: a graph keeps cuBLAS's workspace for its stream, and another of torch's 32 could be that of the step graphs.
        self._stream = torch.cuda.Stream()

    def replay(self, patches_FPX: torch.Tensor, grids: Sequence[Grid]) -> torch.Tensor | None:
        """Return (1 + L, N, D), which the next replay overwrites. Without a graph, count the encode and return None."""
        key = len(patches_FPX), tuple(grids)
        graph = self._graphs.get(key)
        if graph is None:
            if patches_FPX.shape[1] <= MAX_PATCHES_OF_ONE:
                self._seen[key] = self._seen.pop(key, 0) + 1
                if len(self._seen) > MAX_SEEN:
                    self._seen.popitem(last=False)
            return None
        self._graphs.move_to_end(key)
        self._tower.plan(grids)  # the graph reads buffers that other encodes use, too
        graph.patches_FPX.copy_(patches_FPX)
        graph.graph.replay()
        return graph.levels

    def refresh(self) -> None:
        """After new weights, copy the tower's tables to the addresses that the graphs read."""
        for (_, grids), graph in self._graphs.items():
            for table, new in zip(graph.tables.position_PD, self._tower.tables(grids).position_PD, strict=True):
                table.copy_(new)

    def max_bytes(self) -> int:
        """Return the bytes of all graphs: inputs and outputs of each, and the activations of the largest, which are shared."""
        return (MAX_PATCHES_OF_ALL // KEPT_SHARE + MAX_PATCHES_OF_ONE) * self._tower.patch_bytes()

    def capture_one(self, is_busy: bool = False) -> bool:
        """Capture one encode that was repeated often enough. Return False if there is none."""
        enough = SIGHTINGS_WHEN_BUSY if is_busy else SIGHTINGS
        key = next((key for key, count in reversed(self._seen.items()) if count >= enough), None)
        if key is None:
            return False
        del self._seen[key]
        try:
            self._graphs[key] = self._capture(key)
        except RuntimeError as problem:  # several exception types mean out of memory; without a graph an encode is only slower
            logger.warning("a graph of the vision tower was not captured: %s", problem)
            return True
        while sum(graph.patches_FPX.shape[1] for graph in self._graphs.values()) > MAX_PATCHES_OF_ALL:
            self._graphs.popitem(last=False)
        return True

    def _capture(self, key: Key) -> TowerGraph:
        num_frames, grids = key
        tables = self._tower.tables(grids)
        self._tower.plan(grids)
        patches_FPX = self._tower.empty_patches(grids, num_frames)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")  # the decoder's threads may allocate meanwhile
            try:
                levels = self._tower.compute(patches_FPX, tables)
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        return TowerGraph(graph, patches_FPX, tables, levels)
