"""Directory of cached image embeddings; the tensors are in the workers.

The budget is in bytes. The least recently used entry is evicted first; pinned entries never are.
"""

from collections import OrderedDict
from dataclasses import dataclass


@dataclass(slots=True)
class ImageEntry:
    image_id: int
    num_bytes: int
    pins: int = 0


class ImageDirectory:
    """Images on the device, by hash. Invariant (`check`): bytes in use are the sum of the entries and never exceed the budget."""

    def __init__(self, budget_bytes: int):
        self.budget_bytes = budget_bytes
        self.used_bytes = 0
        self.num_pinned = 0  # entries
        self.pinned_bytes = 0
        self.num_evicted = 0
        self._entries: OrderedDict[bytes, ImageEntry] = OrderedDict()  # least recently used first
        self._next_id = 0
        self._evicted_ids: list[int] = []

    def get(self, digest: bytes) -> ImageEntry | None:
        return self._entries.get(digest)

    def pin(self, digest: bytes) -> None:
        """Pin an image until `unpin`. Raises KeyError if it is not cached."""
        self._entries.move_to_end(digest)
        entry = self._entries[digest]
        if entry.pins == 0:
            self.num_pinned += 1
            self.pinned_bytes += entry.num_bytes
        entry.pins += 1

    def unpin(self, digest: bytes) -> None:
        entry = self._entries[digest]
        assert entry.pins > 0
        entry.pins -= 1
        if entry.pins == 0:
            self.num_pinned -= 1
            self.pinned_bytes -= entry.num_bytes

    def reserve(self, digest: bytes, num_bytes: int) -> ImageEntry:
        """Add an entry, evicting unpinned ones as needed; the caller has checked that enough space is unpinned."""
        assert digest not in self._entries
        for victim in self._victims(self.used_bytes + num_bytes - self.budget_bytes):
            self._remove(victim)
            self.num_evicted += 1
        entry = ImageEntry(self._next_id, num_bytes)
        self._next_id += 1
        self._entries[digest] = entry
        self.used_bytes += num_bytes
        return entry

    def forget(self, digest: bytes) -> None:
        """Drop a wrong, unpinned embedding if it exists."""
        if digest in self._entries:
            assert self._entries[digest].pins == 0
            self._remove(digest)

    def forget_unpinned(self) -> None:
        for digest in [digest for digest, entry in self._entries.items() if not entry.pins]:
            self._remove(digest)

    def take_evicted(self) -> list[int]:
        evicted, self._evicted_ids = self._evicted_ids, []
        return evicted

    def _victims(self, excess: int) -> list[bytes]:
        victims = []
        for digest, entry in self._entries.items():
            if excess <= 0:
                break
            if entry.pins == 0:
                victims.append(digest)
                excess -= entry.num_bytes
        assert excess <= 0, "too little space is unpinned"
        return victims

    def _remove(self, digest: bytes) -> None:
        entry = self._entries.pop(digest)
        self.used_bytes -= entry.num_bytes
        self._evicted_ids.append(entry.image_id)
