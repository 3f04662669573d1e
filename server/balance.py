"""Choice of a request's replica by key and load: no sockets, no clock."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from cachetools import LRUCache

MAX_KEYS = 1 << 18
MIN_BOUND = 4  # requests that a replica always accepts
BOUND = 1.25  # maximum load as a multiple of the mean


@dataclass(slots=True, eq=False)
class Backend:
    """A replica. `num_in_flight`: requests from the choice to the end of the answer."""

    url: str
    healthy: bool = False
    num_in_flight: int = 0
    num_taken: int = 0

    @property
    def state(self) -> dict[str, int]:
        """Return what any client may see: no address."""
        return {"healthy": self.healthy, "num_in_flight": self.num_in_flight, "num_taken": self.num_taken}


class Balancer:
    """Assigns keys to replicas. A key stays with its last replica until that leaves, has `bound` times the mean number of requests, or
    MAX_KEYS other keys were seen since. Otherwise, and without a key, the replica with the fewest requests is chosen."""

    def __init__(self, urls: Sequence[str], bound: float = BOUND):
        self.backends = [Backend(url) for url in urls]
        self._bound = bound
        self._homes: LRUCache[bytes, Backend] = LRUCache(MAX_KEYS)

    def take(self, key: bytes) -> Backend | None:
        """Return a replica with one more request, to be passed to `release`; None if no replica is healthy. b"" is no key."""
        healthy = [one for one in self.backends if one.healthy]
        if not healthy:
            return None
        most = max(MIN_BOUND, self._bound * (sum(one.num_in_flight for one in healthy) + 1) / len(healthy))
        digest = hashlib.sha256(key).digest()
        chosen = self._homes.get(digest)
        if chosen not in healthy or chosen.num_in_flight >= most:
            chosen = min(healthy, key=lambda one: (one.num_in_flight, one.num_taken))
        if key:
            self._homes[digest] = chosen
        chosen.num_in_flight += 1
        chosen.num_taken += 1
        return chosen

    def release(self, backend: Backend) -> None:
        backend.num_in_flight -= 1
