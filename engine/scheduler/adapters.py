"""Directory of adapters in the workers' slots; the matrices are in the workers.

A slot whose adapter has running requests is in use; of the others the least recently started one is replaced first. A request whose adapter
has no slot waits; younger requests pass it, but those of one adapter in use, whose slot it gets, do not start. So that slot becomes free.
"""

from collections import OrderedDict
from dataclasses import dataclass

from engine.wire.adapters import AdapterRef, LoadAdapter


@dataclass(slots=True)
class Held:
    """An adapter in a slot, and the number of requests that hold it there."""

    slot: int
    num_users: int = 0


class AdapterDirectory:
    """Adapters in slots, by number. Invariant (`check`): slots are distinct; a user of a slot keeps its adapter there."""

    def __init__(self, num_slots: int = 0):
        self.failed: set[int] = set()  # adapters that a worker could not read
        self._num_slots = num_slots
        self._held: OrderedDict[int, Held] = OrderedDict()  # least recently started first
        self._loads: list[LoadAdapter] = []
        self._promised: dict[int, int] = {}  # adapters that wait in this plan -> those whose slots they get

    def begin_plan(self) -> None:
        self._promised.clear()

    def may_start(self, adapter: AdapterRef | None) -> bool:
        """Return whether a request with this adapter has a slot. Ask once per plan and request, in their order."""
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

    def acquire(self, adapter: AdapterRef | None) -> int:
        """Return the slot of a request that starts, after `may_start`; -1 without an adapter."""
        if adapter is None:
            return -1
        held = self._held.get(adapter.number) or self._place(adapter)
        self._held.move_to_end(adapter.number)
        held.num_users += 1
        return held.slot

    def release(self, adapter: AdapterRef | None) -> None:
        """Release the slot of a request that is preempted or ends."""
        if adapter is not None:
            held = self._held[adapter.number]
            assert held.num_users > 0
            held.num_users -= 1

    def take_loads(self) -> list[LoadAdapter]:
        """Return the orders since the last call, for the next plan."""
        loads, self._loads = self._loads, []
        return loads

    def note_failed(self, numbers: set[int]) -> None:
        self.failed |= numbers

    def check(self, users: dict[int, int]) -> None:
        """Assert the invariant for these numbers of requests that hold slots, by adapter."""
        assert {number: held.num_users for number, held in self._held.items() if held.num_users} == users, "users drifted from requests"
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
