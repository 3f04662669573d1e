"""The directory of cached image embeddings; the bytes are in the workers.

Budgets in bytes, least recently used first out, pinned entries never.

    encode ──▶ device ── evicted: saved, unless the host has it ──▶ host ──▶ dropped
                  ▲  restored: the host's copy stays where it is      │
                  └───────────────────────────────────────────────────┘
"""

from collections import OrderedDict
from dataclasses import dataclass

from engine.arena import Regions
from engine.messages import Save


@dataclass(slots=True)
class ImageEntry:
    """One embedding on the device, or planned to be there."""

    image_id: int
    num_bytes: int
    host_offset: int | None = None  # it is restored from there; None: encoded
    pins: int = 0


@dataclass(slots=True)
class HostCopy:
    """The same in every worker's host memory."""

    offset: int
    num_bytes: int


class HostTier:
    """Copies in host memory, by hash: what left the device first is dropped first.

    A restored image keeps its copy and its place: while the device has it, the copy is worth little.
    Invariant (`check`): the copies' regions are those allocated, within the budget.
    """

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self._regions = Regions(budget_bytes)
        self._copies: OrderedDict[bytes, HostCopy] = OrderedDict()  # as they left the device
        self._held: set[bytes] = set()

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._copies

    def hold(self, digest: bytes) -> int | None:
        """Keeps a copy in place until `end_plan`: the plan restores it. Its offset, if there is one."""
        if digest not in self._copies:
            return None
        self._held.add(digest)
        return self._copies[digest].offset

    def keep(self, digest: bytes, num_bytes: int) -> int | None:
        """Where an image that leaves the device is copied to, dropping what must go. None if it has a copy or finds no room."""
        if digest in self._copies:
            self._copies.move_to_end(digest)
            return None
        if not self._regions.can_hold(num_bytes):
            return None
        while (offset := self._regions.alloc(num_bytes)) is None:
            oldest = next((other for other in self._copies if other not in self._held), None)
            if oldest is None:
                return None
            self.drop(oldest)
        self._copies[digest] = HostCopy(offset, num_bytes)
        self.used_bytes += num_bytes
        return offset

    def drop(self, digest: bytes) -> None:
        """If there is one."""
        copy = self._copies.pop(digest, None)
        if copy is not None:
            self._regions.free(copy.offset)
            self.used_bytes -= copy.num_bytes
            self._held.discard(digest)

    def digests(self) -> list[bytes]:
        return list(self._copies)

    def end_plan(self) -> None:
        """A later plan may save where this one restores: workers copy in plan order."""
        self._held.clear()

    def check(self) -> None:
        """Asserts the invariant."""
        self._regions.check()
        assert self._regions.offsets() == {copy.offset for copy in self._copies.values()}
        assert self.used_bytes == sum(copy.num_bytes for copy in self._copies.values()) <= self.budget_bytes
        assert self._held <= self._copies.keys()


class ImageDirectory:
    """Images on the device, by hash, and `host`, the second tier. Invariant (`check`): bytes in use are the sum of the entries and never
    exceed the budget."""

    def __init__(self, budget_bytes: int, host_budget_bytes: int = 0):
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_pinned = 0  # entries
        self.pinned_bytes = 0
        self.num_evicted = 0
        self.host = HostTier(host_budget_bytes)
        self._entries: OrderedDict[bytes, ImageEntry] = OrderedDict()  # least recently used first
        self._next_id = 0
        self._evicted_ids: list[int] = []
        self._saves: list[Save] = []

    def get(self, digest: bytes) -> ImageEntry | None:
        """If it is on the device."""
        return self._entries.get(digest)

    def knows(self, digest: bytes) -> bool:
        """Whether an image needs no encoding."""
        return digest in self._entries or digest in self.host

    def pin(self, digest: bytes) -> ImageEntry:
        """Until `unpin`. Raises KeyError if it is not cached."""
        self._entries.move_to_end(digest)
        entry = self._entries[digest]
        if entry.pins == 0:
            self.num_pinned += 1
            self.pinned_bytes += entry.num_bytes
        entry.pins += 1
        return entry

    def unpin(self, digest: bytes) -> None:
        entry = self._entries[digest]
        assert entry.pins > 0
        entry.pins -= 1
        if entry.pins == 0:
            self.num_pinned -= 1
            self.pinned_bytes -= entry.num_bytes

    def reserve(self, digest: bytes, num_bytes: int) -> ImageEntry | None:
        """A new entry, evicting what must go; None, and nothing is evicted, if pinned entries leave too little room."""
        assert digest not in self._entries
        victims = self._victims(self.used_bytes + num_bytes - self.budget_bytes)
        if victims is None:
            return None
        host_offset = self.host.hold(digest)  # before the victims, which look for a place there
        for victim in victims:
            self._evict(victim)
        entry = ImageEntry(self._next_id, num_bytes, host_offset)
        self._next_id += 1
        self._entries[digest] = entry
        self.used_bytes += num_bytes
        return entry

    def forget(self, digest: bytes) -> None:
        """Drops a wrong embedding, which is not pinned, from both tiers."""
        self.host.drop(digest)
        if digest in self._entries:
            assert self._entries[digest].pins == 0
            self._remove(digest)

    def forget_unpinned(self) -> None:
        """Empties both tiers, but for what is pinned."""
        for digest in {*self._entries, *self.host.digests()}:
            if digest not in self._entries or not self._entries[digest].pins:
                self.forget(digest)

    def take_evicted(self) -> tuple[list[int], list[Save]]:
        """The ids that left since the last call, and what is copied to the host first: for the next plan."""
        evicted, saves = self._evicted_ids, self._saves
        self._evicted_ids, self._saves = [], []
        self.host.end_plan()
        return evicted, saves

    def check(self) -> None:
        """Asserts the invariant."""
        assert self.used_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self.budget_bytes
        assert all(entry.pins >= 0 for entry in self._entries.values())
        pinned = [entry.num_bytes for entry in self._entries.values() if entry.pins]
        assert (self.num_pinned, self.pinned_bytes) == (len(pinned), sum(pinned))
        assert len({entry.image_id for entry in self._entries.values()}) == len(self._entries)
        self.host.check()

    def _victims(self, excess: int) -> list[bytes] | None:
        victims = []
        for digest, entry in self._entries.items():
            if excess <= 0:
                break
            if entry.pins == 0:
                victims.append(digest)
                excess -= entry.num_bytes
        return victims if excess <= 0 else None

    def _evict(self, digest: bytes) -> None:
        entry = self._entries[digest]
        offset = self.host.keep(digest, entry.num_bytes)
        if offset is not None:
            self._saves.append(Save(entry.image_id, offset))
        self._remove(digest)
        self.num_evicted += 1

    def _remove(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        self.used_bytes -= entry.num_bytes
        self._evicted_ids.append(entry.image_id)
