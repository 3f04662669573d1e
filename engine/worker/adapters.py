"""Adapters in a worker: a thread reads them to host memory, and plans load them into slots on the device."""

import logging
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from cachetools import LRUCache

from engine.wire.adapters import AdapterRead, AdapterRef, LoadAdapter, ReadAdapter
from models.decoders.contract import LanguageModel
from models.kernels.backend import Backend
from models.lora.adapter import read_adapter
from models.lora.slots import AdapterSlots, Weights, read_weights

logger = logging.getLogger(__name__)


class WorkerAdapters:
    """Adapters of a loaded model with LoRA ranks up to `max_rank`. `stream` is the tower's. The thread that reads calls `report`."""

    def __init__(
        self,
        model: LanguageModel,
        backend: Backend,
        num_slots: int,
        num_kept: int,
        max_rank: int,
        stream: torch.cuda.Stream | None,
        report: Callable[[AdapterRead], object],
    ) -> None:
        self._model, self._max_rank, self._stream, self._report = model, max_rank, stream, report
        self._slots = AdapterSlots(model, backend, num_slots, max_rank)
        self._kept: LRUCache[int, Future[Weights]] = LRUCache(num_kept)  # the next one to load is the last one that was read
        self._reader = ThreadPoolExecutor(1, "adapters")

    def keep(self, adapters: Iterable[AdapterRef]) -> None:
        """Read adapters to host memory in advance. ValueError or OSError."""
        for adapter in adapters:
            self._weights(adapter).result()

    def read(self, order: ReadAdapter) -> None:
        self._reader.submit(self._report_on, order.adapter, self._weights(order.adapter))

    @torch.inference_mode()
    def load(self, orders: Sequence[LoadAdapter]) -> None:
        self._join_streams(orders)
        for order in orders:
            self._slots.load(order.slot, self._kept[order.adapter.number].result())
        self._join_streams(orders)

    def tower(self, slot: int) -> AbstractContextManager[None]:
        """Return the context in which the tower encodes images with a slot; -1: none."""
        return self._slots.tower(slot)

    def _weights(self, adapter: AdapterRef) -> Future[Weights]:
        if adapter.number not in self._kept:
            self._kept[adapter.number] = self._reader.submit(self._read, adapter)
        return self._kept[adapter.number]

    def _read(self, adapter: AdapterRef) -> Weights:
        if is_gpu := self._model.device.type == "cuda":
            torch.cuda.set_device(self._model.device)  # the current device is per thread
        found = read_adapter(Path(adapter.folder), self._model.config, self._max_rank)
        return read_weights(found, self._model.dtype, is_pinned=is_gpu)

    def _report_on(self, adapter: AdapterRef, weights: Future[Weights]) -> None:
        """Report the result of an earlier job of the same thread."""
        if (problem := weights.exception()) is not None:
            logger.error("the adapter in %r cannot be read: %s", adapter.folder, problem)
        self._report(AdapterRead(adapter.number, problem is None))

    def _join_streams(self, orders: Sequence[LoadAdapter]) -> None:
        """Let the steps' stream and the tower's wait for each other: both read slots."""
        if orders and self._stream is not None:
            steps = torch.cuda.current_stream(self._stream.device)
            steps.wait_stream(self._stream)
            self._stream.wait_stream(steps)
