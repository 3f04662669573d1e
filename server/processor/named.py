"""Images that clients send by name."""

from collections import OrderedDict

MAX_BYTES = 256 << 20  # of encoded images, on the heap


class NamedImages:
    """Encoded bytes by name, within MAX_BYTES, least recently used out first. Used by the event loop alone."""

    def __init__(self) -> None:
        self._images: OrderedDict[bytes, bytes] = OrderedDict()
        self._num_bytes = 0

    def get(self, name: bytes) -> bytes | None:
        if name not in self._images:
            return None
        self._images.move_to_end(name)
        return self._images[name]

    def put(self, name: bytes, data: bytes) -> None:
        """Replaces. Not kept if larger than MAX_BYTES."""
        self._num_bytes += len(data) - len(self._images.pop(name, b""))
        self._images[name] = data
        while self._num_bytes > MAX_BYTES:
            _, oldest = self._images.popitem(last=False)
            self._num_bytes -= len(oldest)
