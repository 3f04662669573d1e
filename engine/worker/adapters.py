"""Worker side of adapters: executes the load orders of plans. Matrices are read from the adapters' folders and kept in host memory; the
least recently loaded ones are dropped first."""

import logging
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from cachetools import LRUCache

from engine.wire.adapters import AdapterRef, LoadAdapter
from engine.worker.slots import FixedWeights
from models.decoders.contract import LanguageModel
from models.kernels.backend import Backend
from models.lora.adapter import read_adapter
from models.lora.slots import AdapterSlots, Weights, read_weights

logger = logging.getLogger(__name__)


class WorkerAdapters(FixedWeights):
    """Adapters of a loaded model with LoRA ranks up to `max_rank`. `stream` is the tower's."""

    def __init__(
        self, model: LanguageModel, backend: Backend, num_slots: int, num_kept: int, max_rank: int, stream: torch.cuda.Stream | None
    ) -> None:
        self._model, self._max_rank, self._stream = model, max_rank, stream
        self._slots = AdapterSlots(model, backend, num_slots, max_rank)
        self._kept: LRUCache[int, Weights] = LRUCache(num_kept)

    def keep(self, adapters: Iterable[AdapterRef]) -> None:
        """Read adapters to host memory in advance. ValueError or OSError."""
        for adapter in adapters:
            self._read(adapter)

    @torch.inference_mode()
    def load(self, orders: Sequence[LoadAdapter]) -> list[int]:
        failed = []
        self._join_streams(orders)
        for order in orders:
            weights: Weights = {}
            try:
                weights = self._read(order.adapter)
            except (ValueError, OSError, MemoryError) as problem:
                logger.error("the adapter in %s cannot be read: %s", order.adapter.folder, problem)
                failed.append(order.adapter.number)
            self._slots.load(order.slot, weights)
        self._join_streams(orders)
        return failed

    def tower(self, slot: int) -> AbstractContextManager[None]:
        return self._slots.tower(slot)

    def _read(self, adapter: AdapterRef) -> Weights:
        if adapter.number not in self._kept:
            found, is_gpu = read_adapter(Path(adapter.folder), self._model.config, self._max_rank), self._model.device.type == "cuda"
            self._kept[adapter.number] = read_weights(found, self._model.dtype, is_pinned=is_gpu)
        return self._kept[adapter.number]

    def _join_streams(self, orders: Sequence[LoadAdapter]) -> None:
        """Let the steps' stream and the tower's wait for each other: both read slots."""
        if orders and self._stream is not None:
            steps = torch.cuda.current_stream(self._stream.device)
            steps.wait_stream(self._stream)
            self._stream.wait_stream(steps)
