"""Hint to rank 0: while the engine is idle, encode the first new JPEG of a request while it is hashed and its prompt is built.

The hint affects no decision: a worker that has not encoded the image when a plan names it, or to another size, does so then."""

import contextlib
import threading

import msgspec
from cachetools import LRUCache

from engine.wire.ipc import Outbox
from engine.wire.messages import MAX_EARLY_TOKENS, ImageSource, Prefetch
from models.media.geometry import VisionGeometry

NUM_REMEMBERED = 4096  # images seen before, which are usually encoded
MAX_PIXELS, MAX_BYTES = 1 << 24, 1 << 25  # held by a worker in addition to its planned memory
TAIL_BYTES = 64  # with the length they identify an image well enough for a hint


class EarlyReads:
    """Announces images to `worker`, rank 0's inbox (None if no GPU decodes). As a request's own size limits arrive later, `geometry` is
    that of the last request."""

    def __init__(self, worker: Outbox[Prefetch] | None, geometry: VisionGeometry):
        self.geometry = geometry
        self.is_urgent = False  # the device is idle until the first image is announced
        self._worker = worker
        self._is_armed = False
        self._seen: LRUCache[tuple[int, bytes], None] = LRUCache(NUM_REMEMBERED)
        self._num_sent = 0
        self._lock = threading.Lock()  # also protects the socket

    def arm(self, is_idle: bool) -> None:
        with self._lock:
            self._is_armed = self.is_urgent = is_idle and self._worker is not None

    def announce(self, data: memoryview, source: ImageSource) -> int:
        """Return the ticket under which rank 0 encodes this baseline JPEG now, or 0. May be called from any thread."""
        with self._lock, contextlib.suppress(ValueError):  # a shape that will be rejected
            key = len(data), bytes(data[-TAIL_BYTES:])
            is_new = key not in self._seen
            self._seen[key] = None
            grid = self.geometry.grid(source.height, source.width)
            is_small = source.height * source.width <= MAX_PIXELS and len(data) <= MAX_BYTES
            is_small = is_small and self.geometry.num_tokens(grid) <= MAX_EARLY_TOKENS
            if self._worker is not None and self._is_armed and is_new and is_small:
                self._is_armed = False
                self._num_sent += 1
                self._worker.send(Prefetch(msgspec.structs.replace(source, ticket=self._num_sent), grid))
                return self._num_sent
        return 0
