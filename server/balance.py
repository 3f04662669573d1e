"""Which replica gets a request: the key of a body, and the choice by key and load. No sockets, no clock."""

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

HEADER = re.compile(rb'"data:[^",]{0,256};base64,')
HEADER_BYTES = 6 + 256 + 8  # the longest match
HASHED_BYTES = 64 << 10  # of a payload
MAX_KEYS = 1 << 18
MIN_BOUND = 4  # requests that any replica takes, however few there are
BOUND = 1.25  # times the mean


@dataclass(slots=True, eq=False)
class Backend:
    """A replica. `num_in_flight` counts from the choice to the end of the answer."""

    url: str
    healthy: bool = False
    num_in_flight: int = 0
    num_keys: int = 0
    num_taken: int = 0


class Balancer:
    """Rendezvous hashing with bounded load. A new key's home is the less loaded of the first two of its order, until that replica leaves or
    is full, or `max_keys` others were seen since. A replica is full with `bound` times the mean of requests."""

    def __init__(self, urls: Sequence[str], max_keys: int = MAX_KEYS, bound: float = BOUND):
        self.backends = [Backend(url) for url in urls]
        self._max_keys, self._bound = max_keys, bound
        self._homes: dict[bytes, Backend] = {}  # the newest last

    def take(self, key: bytes | None) -> Backend | None:
        """A place on a replica, to be given back with `release`. None: no replica is healthy."""
        healthy = [one for one in self.backends if one.healthy]
        if not healthy:
            return None
        chosen = self._home(key, healthy) if key else min(healthy, key=lambda one: (one.num_in_flight, one.num_taken))
        chosen.num_in_flight += 1
        chosen.num_taken += 1
        return chosen

    def release(self, backend: Backend) -> None:
        backend.num_in_flight -= 1

    def _home(self, key: bytes, healthy: list[Backend]) -> Backend:
        """The next of the key's order that has room becomes its home if that has none; the bound is above the mean, so one has."""
        bound = max(MIN_BOUND, math.ceil(self._bound * (sum(one.num_in_flight for one in healthy) + 1) / len(healthy)))
        order, home = _order(key, healthy), self._forget(key)
        if home not in order:
            home = min(order[:2], key=lambda one: (one.num_in_flight, one.num_keys))
        if home.num_in_flight >= bound:
            home = next(one for one in order if one.num_in_flight < bound)
        self._homes[key] = home
        home.num_keys += 1
        if len(self._homes) > self._max_keys:
            self._forget(next(iter(self._homes)))
        return home

    def _forget(self, key: bytes) -> Backend | None:
        home = self._homes.pop(key, None)
        if home is not None:
            home.num_keys -= 1
        return home


def _order(key: bytes, backends: list[Backend]) -> list[Backend]:
    """A replica that leaves or comes changes nothing in how the others follow each other."""
    return sorted(backends, key=lambda one: hashlib.blake2b(key + one.url.encode(), digest_size=8).digest(), reverse=True)


class ImageKey:
    """The key of a body: the hash of the begin of its first image's payload, as base64. Linear in the bytes fed, which `held` keeps."""

    def __init__(self, held: bytearray) -> None:
        self.held = held
        self.begins_at: int | None = None  # the payload
        self._searched = 0

    def feed(self, chunk: bytes) -> bytes | None:
        """The key as soon as HASHED_BYTES of the payload, or its end, are there. The same however a body is split."""
        self.held += chunk
        if self.begins_at is None:
            header = HEADER.search(self.held, self._searched)
            if header is None:
                self._searched = max(self._searched, len(self.held) - HEADER_BYTES)
                return None
            self.begins_at = self._searched = header.end()
        limit = self.begins_at + HASHED_BYTES
        end = self.held.find(b'"', self._searched, limit)
        if end < 0 and len(self.held) < limit:
            self._searched = len(self.held)
            return None
        return hashlib.sha256(self.held[self.begins_at : end if end >= 0 else limit]).digest()
