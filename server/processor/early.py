"""The first new image of an idle engine is decoded and encoded before there is a plan: rank 0 is told of it as soon as its bytes are there,
while it is hashed and its prompt is built. Used by `server/processor/image.py`; what comes of it is in `engine/worker/images.py`.

A hint and no more: a plan names the image as always, and workers that have not read it, or to another size, do that then.
"""

import contextlib
import hashlib
import threading
from collections import OrderedDict

from engine.ipc import Outbox
from engine.messages import ImageSource, Prefetch
from models.geometry import Grid, VisionGeometry

NUM_REMEMBERED = 4096  # images that were seen, and as a rule encoded; one that is forgotten may be read once too often
MAX_PIXELS = 1 << 24  # 48 MiB of RGB, which a worker holds beside what its memory was planned for
MAX_BYTES = 1 << 25
SAMPLE_BYTES = 2048


def fingerprint(data: memoryview) -> bytes:
    """Tells images apart well enough for a hint, in some microseconds: by their length, their middle and their end."""
    middle = len(data) // 2
    return hashlib.sha256(b"%d:" % len(data) + bytes(data[middle : middle + SAMPLE_BYTES]) + bytes(data[-SAMPLE_BYTES:])).digest()


class EarlyReads:
    """`worker` is rank 0's inbox, None if its images are not decoded by a GPU. Images are announced from any thread.

    To which size a request has its images brought is not known when they come, so `geometry` is that of the last one: set it."""

    def __init__(self, worker: Outbox[Prefetch] | None, geometry: VisionGeometry):
        self.geometry = geometry
        self._worker = worker
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # least recently first
        self._rid = 0  # of the request whose first new image is worth it
        self._is_armed = self._is_urgent = False
        self._num_sent = 0
        self._lock = threading.Lock()  # also of the socket, which one thread at a time may use

    def arm(self, rid: int, is_idle: bool) -> None:
        """Something of a request has come. The first new image of one that comes to an idle engine is worth it; with the next request the
        worker has others to work for."""
        with self._lock:
            if rid != self._rid:
                self._rid, self._is_armed, self._is_urgent = rid, is_idle, is_idle and self._worker is not None

    def is_urgent(self) -> bool:
        """Once for each request to an idle engine: the device has nothing to do until the image that came first is announced."""
        with self._lock:
            is_urgent, self._is_urgent = self._is_urgent, False
            return is_urgent

    def announce(self, key: bytes, source: ImageSource) -> int:
        """The ticket under which rank 0 reads a plain JPEG of this fingerprint now; 0 if it does not."""
        with self._lock:
            is_new = key not in self._seen
            self._seen[key] = None
            self._seen.move_to_end(key)
            if len(self._seen) > NUM_REMEMBERED:
                self._seen.popitem(last=False)
            is_large = source.height * source.width > MAX_PIXELS or source.region.length > MAX_BYTES
            if self._worker is None or not self._is_armed or not is_new or is_large:
                return 0
            self._is_armed = False
            self._num_sent += 1
            self._worker.send(Prefetch(source, self._num_sent, self._grid(source)))
            return self._num_sent

    def _grid(self, source: ImageSource) -> Grid | None:
        """None for a shape that will be refused."""
        with contextlib.suppress(ValueError):
            return self.geometry.grid(source.height, source.width)
        return None
