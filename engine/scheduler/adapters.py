"""Directory of adapters in the workers' slots; the matrices are in the workers.

A slot whose adapter has running requests is in use; of the others the least recently started one is replaced first. If all slots are in
use, a request whose adapter has no slot waits. Only later requests without an adapter may overtake it, so that a slot becomes free.

An adapter gets a slot when all ranks have read it to host memory. One adapter is read at a time.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.wire.adapters import AdapterRead, AdapterRef, LoadAdapter, ReadAdapter, number_of
from engine.wire.messages import EngineRequest, ErrorInfo

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
        self._reads: list[ReadAdapter] = []  # not sent yet
        self._held: OrderedDict[int, Held] = OrderedDict()  # least recently started first
        self._loads: list[LoadAdapter] = []
        self._is_full = False  # a request of this plan waits for a slot

    def begin_plan(self) -> None:
        """Begin a plan, during which `may_start` is called once per request, in order."""
        self._is_full = False

    def may_start(self, wire: EngineRequest) -> bool:
        adapter = wire.adapter
        if adapter is None:
            return True
        if self._is_full or adapter.number in self._held:
            return not self._is_full
        is_read = self._is_read(adapter)  # also while it waits for a slot
        self._is_full = len(self._held) == self._num_slots and all(held.num_users for held in self._held.values())
        return is_read and not self._is_full

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

    def error_of(self, wire: EngineRequest) -> ErrorInfo | None:
        return UNREADABLE if number_of(wire.adapter) in self._failed else None

    def _is_read(self, adapter: AdapterRef) -> bool:
        """Return whether all ranks have read the adapter. If not, it is read next, unless another one is being read."""
        is_done = self._next is None or self._num_read == self._num_ranks
        if self._next is not None and self._next.number == adapter.number:
            return is_done
        if is_done:
            self._next, self._num_read = adapter, 0
            self._reads.append(ReadAdapter(adapter))
        return False

    def _place(self, adapter: AdapterRef) -> Held:
        assert self._next is not None and self._next.number == adapter.number
        self._next, slot = None, len(self._held)
        if slot == self._num_slots:
            idle = next(number for number, held in self._held.items() if not held.num_users)
            slot = self._held.pop(idle).slot
        held = self._held[adapter.number] = Held(slot)
        self._loads.append(LoadAdapter(slot, adapter))
        return held
