"""Images that clients send by name."""

from collections import OrderedDict

from server.errors import RequestError
from server.processor.media.recent import Recent

MAX_BYTES = 256 << 20  # of encoded images, on the heap
NUM_BOUND = 1 << 16  # names whose content is known, also when its bytes are gone


class NamedImages:
    """Encoded bytes by name, within MAX_BYTES, least recently used out first. A name stays with the content that it came with first. Used
    by the event loop alone."""

    def __init__(self) -> None:
        self._images: OrderedDict[bytes, bytes] = OrderedDict()
        self._digests: Recent[bytes, bytes] = Recent(NUM_BOUND)
        self._num_bytes = 0

    def get(self, name: bytes) -> bytes | None:
        if name not in self._images:
            return None
        self._images.move_to_end(name)
        return self._images[name]

    def bind(self, name: bytes, digest: bytes) -> bool:
        """Whether the name's bytes are to be `put`. RequestError if it is that of other content."""
        known = self._digests.get(name)
        if known not in (None, digest):
            raise RequestError(400, "this uuid is already that of other content: send it under another uuid", code="uuid_mismatch")
        self._digests.put(name, digest)
        return known is None or name not in self._images

    def put(self, name: bytes, data: bytes) -> None:
        """Of a name that is bound. Not kept if larger than MAX_BYTES."""
        self._num_bytes += len(data) - len(self._images.pop(name, b""))
        self._images[name] = data
        while self._num_bytes > MAX_BYTES:
            _, oldest = self._images.popitem(last=False)
            self._num_bytes -= len(oldest)
