"""Images that clients refer to by name."""

import contextlib

from cachetools import LRUCache

from server.errors import RequestError

MAX_BYTES = 256 << 20  # bytes of encoded images, on the heap
NUM_BOUND = 1 << 16  # names of known content, also after its bytes were evicted


class NamedImages:
    """LRU cache of encoded bytes by name, up to MAX_BYTES. A name stays bound to its first content. Used only in the event loop."""

    def __init__(self) -> None:
        self._images: LRUCache[bytes, bytes] = LRUCache(MAX_BYTES, len)
        self._digests: LRUCache[bytes, bytes] = LRUCache(NUM_BOUND)

    def get(self, name: bytes) -> bytes | None:
        return self._images.get(name)

    def bind(self, name: bytes, digest: bytes) -> bool:
        """Bind the name to this content. Return whether to `put` its bytes. RequestError if the name is bound to other content."""
        known = self._digests.get(name)
        if known not in (None, digest):
            raise RequestError(400, "this uuid is already that of other content: send it under another uuid", code="uuid_mismatch")
        self._digests[name] = digest
        return known is None or name not in self._images

    def put(self, name: bytes, data: bytes) -> None:
        """Store the content of a bound name, unless it is larger than MAX_BYTES."""
        with contextlib.suppress(ValueError):
            self._images[name] = data
