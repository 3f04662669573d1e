"""Directory of adapters in the workers' slots; the matrices are in the workers.

A slot whose adapter has running requests is in use; of the others the least recently started one is replaced first. If all slots are in
use, a request whose adapter has no slot waits, and younger requests may overtake it. One adapter must then give up its slot: its new
requests do not start, so that the slot becomes free.

An adapter gets a slot when all ranks have read it to host memory. One adapter is read at a time.
"""

import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.scheduler.request import Request
from engine.wire.adapters import AdapterRead, AdapterRef, LoadAdapter, ReadAdapter, number_of
from engine.wire.messages import EngineRequest, ErrorInfo
from engine.wire.stats import Info

UNREADABLE = ErrorInfo(503, "The adapter could not be read: load it again.", code="adapter_unreadable")


@dataclass(slots=True)
class Held:
    slot: int
    num_users: int = 0


class AdapterDirectory:
    """Adapters in slots, by number. Invariant: slots are distinct; an adapter keeps its slot while a request uses it."""

    def __init__(self, num_slots: int, num_ranks: int):
        self._failed: set[int] = set()  # adapters that a worker could not read
        self._num_slots, self._num_ranks = num_slots, num_ranks
        self._next: AdapterRef | None = None  # the adapter that is read for the next slot
        self._num_read = 0  # ranks that have read it, or failed
        self._is_claimed = False  # a request of this plan may start with it
        self._reads: list[ReadAdapter] = []  # not sent yet
        self._held: OrderedDict[int, Held] = OrderedDict()  # least recently started first
        self._loads: list[LoadAdapter] = []
        self._promised: dict[int, int] = {}  # in this plan: waiting adapter -> adapter that must give up its slot

    def begin_plan(self) -> None:
        """Begin a plan, during which `may_start` is called once per request, in order."""
        self._promised.clear()
        self._is_claimed = False

    def may_start(self, wire: EngineRequest) -> bool:
        adapter = wire.adapter
        if adapter is None:
            return True
        promised = self._promised.values()
        if adapter.number in self._held:
            return adapter.number not in promised
        if adapter.number in self._promised:
            return False
        is_read = self._is_read(adapter)  # also while it waits for a slot
        others = [(number, held) for number, held in self._held.items() if number not in promised]
        if len(self._held) < self._num_slots or any(not held.num_users for _, held in others):
            return is_read
        if others:
            self._promised[adapter.number] = others[0][0]
        return False

    def acquire(self, wire: EngineRequest) -> int:
        """Return the slot of a request that starts, after `may_start`; -1: it has no adapter."""
        adapter = wire.adapter
        if adapter is None:
            return -1
        held = self._held.get(adapter.number) or self._place(adapter)
        self._held.move_to_end(adapter.number)
        held.num_users += 1
        return held.slot

    def release(self, wire: EngineRequest) -> None:
        if wire.adapter is not None:
            held = self._held[wire.adapter.number]
            assert held.num_users > 0
            held.num_users -= 1

    def take_loads(self) -> Sequence[LoadAdapter]:
        loads, self._loads = self._loads, []
        return loads

    def take_reads(self) -> Sequence[ReadAdapter]:
        reads, self._reads = self._reads, []
        return reads

    def note_read(self, read: AdapterRead) -> None:
        assert self._next is not None and self._next.number == read.number
        self._num_read += 1
        if not read.is_readable:
            self._failed.add(read.number)

    def infos(self, running: Iterable[Request], waiting: Iterable[Request]) -> list[Info]:
        if not self._num_slots:
            return []
        labels = {"max_lora": str(self._num_slots), "running_lora_adapters": _names(running), "waiting_lora_adapters": _names(waiting)}
        return [Info("vllm:lora_requests_info", "adapters of running and waiting requests", labels, time.time())]

    def error_of(self, wire: EngineRequest) -> ErrorInfo | None:
        return UNREADABLE if number_of(wire.adapter) in self._failed else None

    def _is_read(self, adapter: AdapterRef) -> bool:
        """Return whether all ranks have read the adapter. If not, it is read next, unless another one is read or claimed."""
        is_done = self._next is None or self._num_read == self._num_ranks
        if self._next is not None and self._next.number == adapter.number:
            self._is_claimed = is_done
            return is_done
        if is_done and not self._is_claimed:
            self._next, self._num_read = adapter, 0
            self._reads.append(ReadAdapter(adapter))
        return False

    def _place(self, adapter: AdapterRef) -> Held:
        assert self._next is not None and self._next.number == adapter.number
        self._next, slot = None, len(self._held)
        if slot == self._num_slots:
            idle = next(number for number, held in self._held.items() if not held.num_users and number not in self._promised.values())
            slot = self._held.pop(idle).slot
        held = self._held[adapter.number] = Held(slot)
        self._loads.append(LoadAdapter(slot, adapter))
        return held


def _names(requests: Iterable[Request]) -> str:
    return ",".join(sorted({request.wire.adapter.name for request in requests if request.wire.adapter is not None}))
