"""The directory of cached image embeddings: one authority that names ids and evictions; the tensors are in the workers.

Used by the scheduler's policy. Budget in bytes, least recently used first out, pinned entries never.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class ImageEntry:
    """One embedding in the workers' caches, or planned to be there."""

    image_id: int
    num_bytes: int
    pins: int = 0


class ImageDirectory:
    """Which images are cached, by hash. Invariant (`check`): bytes in use are the sum of the entries and never exceed the budget."""

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_evicted = 0
        self._entries: OrderedDict[bytes, ImageEntry] = OrderedDict()  # least recently used first
        self._next_id = 0
        self._evicted_ids: list[int] = []

    @property
    def num_pinned(self) -> int:
        return sum(entry.pins > 0 for entry in self._entries.values())

    @property
    def pinned_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._entries.values() if entry.pins > 0)

    def get(self, digest: bytes) -> ImageEntry | None:
        """The entry of an image, or None."""
        return self._entries.get(digest)

    def pin(self, digest: bytes) -> ImageEntry:
        """Keeps an entry from eviction until `unpin`. Raises KeyError if it is not cached."""
        self._entries.move_to_end(digest)
        entry = self._entries[digest]
        entry.pins += 1
        return entry

    def unpin(self, digest: bytes) -> None:
        entry = self._entries[digest]
        assert entry.pins > 0
        entry.pins -= 1

    def reserve(self, digest: bytes, num_bytes: int) -> ImageEntry | None:
        """A new entry, evicting what must go; None if pinned entries leave too little room (then nothing is evicted)."""
        assert digest not in self._entries
        victims = self._victims(self.used_bytes + num_bytes - self.budget_bytes)
        if victims is None:
            return None
        for victim in victims:
            self._remove(victim)
            self.num_evicted += 1
        entry = ImageEntry(self._next_id, num_bytes)
        self._next_id += 1
        self._entries[digest] = entry
        self.used_bytes += num_bytes
        return entry

    def forget(self, digest: bytes) -> None:
        """Drops an entry whose embedding turned out to be wrong; nobody may pin it any more."""
        if digest in self._entries:
            assert self._entries[digest].pins == 0
            self._remove(digest)

    def take_evicted(self) -> list[int]:
        """The ids that left since the last call: the next plan names them."""
        evicted, self._evicted_ids = self._evicted_ids, []
        return evicted

    def check(self) -> None:
        """Asserts the invariant."""
        assert self.used_bytes == sum(entry.num_bytes for entry in self._entries.values()) <= self.budget_bytes
        assert all(entry.pins >= 0 for entry in self._entries.values())
        assert len({entry.image_id for entry in self._entries.values()}) == len(self._entries)

    def _victims(self, excess: int) -> list[bytes] | None:
        victims = []
        for digest, entry in self._entries.items():
            if excess <= 0:
                break
            if entry.pins == 0:
                victims.append(digest)
                excess -= entry.num_bytes
        return victims if excess <= 0 else None

    def _remove(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        self.used_bytes -= entry.num_bytes
        self._evicted_ids.append(entry.image_id)
