"""Directory of adapters in the workers' slots; the matrices are in the workers.

A slot whose adapter has running requests is in use; of the others the least recently started one is replaced first. If all slots are in
use, a request whose adapter has no slot waits, and younger requests may overtake it. One adapter must then give up its slot: its new
requests do not start, so that the slot becomes free.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.scheduler.request import Request
from engine.wire.adapters import AdapterRef, LoadAdapter, number_of
from engine.wire.messages import EngineRequest, ErrorInfo
from engine.wire.metric import Info

UNREADABLE = ErrorInfo(503, "The adapter could not be read: load it again.", code="adapter_unreadable")


@dataclass(slots=True)
class Held:
    """An adapter in a slot, and the number of requests that hold it there."""

    slot: int
    num_users: int = 0


class AdapterDirectory:
    """Adapters in slots, by number. Invariant (`check`): slots are distinct; an adapter keeps its slot while a request uses it."""

    def __init__(self, num_slots: int):
        self._failed: set[int] = set()  # adapters that a worker could not read
        self._num_slots = num_slots
        self._held: OrderedDict[int, Held] = OrderedDict()  # least recently started first
        self._loads: list[LoadAdapter] = []
        self._promised: dict[int, int] = {}  # in this plan: waiting adapter -> adapter that must give up its slot

    def begin_plan(self) -> None:
        self._promised.clear()

    def may_start(self, wire: EngineRequest) -> bool:
        adapter = wire.adapter
        if adapter is None:
            return True
        promised = self._promised.values()
        if adapter.number in self._held:
            return adapter.number not in promised
        if adapter.number in self._promised:
            return False
        others = [(number, held) for number, held in self._held.items() if number not in promised]
        if len(self._held) < self._num_slots or any(not held.num_users for _, held in others):
            return True
        if others:
            self._promised[adapter.number] = others[0][0]
        return False

    def acquire(self, wire: EngineRequest) -> int:
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

    def of_images(self, request: Request) -> int:
        adapter = request.wire.adapter
        return request.slot if adapter is not None and adapter.has_tower else -1

    def take_loads(self) -> Sequence[LoadAdapter]:
        loads, self._loads = self._loads, []
        return loads

    def note_failed(self, numbers: set[int]) -> None:
        self._failed |= numbers

    def infos(self, running: Iterable[Request], waiting: Iterable[Request]) -> list[Info]:
        if not self._num_slots:
            return []
        labels = {"max_lora": str(self._num_slots), "running_lora_adapters": _names(running), "waiting_lora_adapters": _names(waiting)}
        return [Info("vllm:lora_requests_info", "adapters of running and waiting requests", labels, time.time())]

    def error_of(self, wire: EngineRequest) -> ErrorInfo | None:
        return UNREADABLE if number_of(wire.adapter) in self._failed else None

    def check(self, holders: Sequence[Request]) -> None:
        users = Counter(request.wire.adapter.number for request in holders if request.wire.adapter is not None)
        assert {number: held.num_users for number, held in self._held.items() if held.num_users} == users, "wrong user counts"
        slots = [held.slot for held in self._held.values()]
        assert len(set(slots)) == len(slots) <= self._num_slots

    def _place(self, adapter: AdapterRef) -> Held:
        slot = len(self._held)
        if slot == self._num_slots:
            idle = next(number for number, held in self._held.items() if not held.num_users and number not in self._promised.values())
            slot = self._held.pop(idle).slot
        held = self._held[adapter.number] = Held(slot)
        self._loads.append(LoadAdapter(slot, adapter))
        return held


def _names(requests: Iterable[Request]) -> str:
    return ",".join(sorted({request.wire.adapter.name for request in requests if request.wire.adapter is not None}))
