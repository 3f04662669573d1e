"""Images that clients send by name."""

import contextlib

from cachetools import LRUCache

from server.errors import RequestError

MAX_BYTES = 256 << 20  # bytes of encoded images, on the heap
NUM_BOUND = 1 << 16  # names of known content, also after its bytes were evicted


class NamedImages:
    """Encoded bytes by name, within MAX_BYTES, least recently used out first. A name stays with the content that it came with first. Used
    by the event loop alone."""

    def __init__(self) -> None:
        self._images: LRUCache[bytes, bytes] = LRUCache(MAX_BYTES, len)
        self._digests: LRUCache[bytes, bytes] = LRUCache(NUM_BOUND)

    def get(self, name: bytes) -> bytes | None:
        return self._images.get(name)

    def bind(self, name: bytes, digest: bytes) -> bool:
        """Whether the name's bytes are to be `put`. RequestError if it is that of other content."""
        known = self._digests.get(name)
        if known not in (None, digest):
            raise RequestError(400, "this uuid is already that of other content: send it under another uuid", code="uuid_mismatch")
        self._digests[name] = digest
        return known is None or name not in self._images

    def put(self, name: bytes, data: bytes) -> None:
        """Store the content of a bound name, unless it is larger than MAX_BYTES."""
        with contextlib.suppress(ValueError):
            self._images[name] = data
