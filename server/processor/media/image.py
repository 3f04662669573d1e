"""Images of requests, each owned by one object from its payload to its release.

    payload, URL ──▶ encoded ─┬▶ jpeg: a plain one stays as it is
      (media pool: fetch,     └▶ file: decoded if the scheduler requests the pixels (decoders) ──▶ rgb
       base64, header, hash)
"""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import msgspec
from cachetools import LRUCache

from engine.wire.ipc import Outbox
from engine.wire.messages import MAX_EARLY_TOKENS, PROCESSOR_ARENA, ImageSource, ImageSpan, MediaRef, Prefetch, Region
from models.config.types import MediaKind
from models.media.geometry import Grid, VisionGeometry
from server.errors import PROMPT, RequestError
from server.processor.media.decoders import Decoders
from server.processor.media.inspect import Header, Inspector
from server.processor.media.sources import File, Sources
from server.processor.text.prompt import Visual
from server.region import GrowingRegion

NUM_REMEMBERED = 4096  # images seen before, which are usually encoded
MAX_PIXELS, MAX_BYTES = 1 << 24, 1 << 25  # held by a worker in addition to its planned memory
TAIL_BYTES = 64  # with the length they identify an image well enough for a hint
AT_ONCE_BYTES = 1 << 20  # of base64 that the event loop decodes itself (in 0.3 ms) while the device is idle


class EarlyReads:
    """Hint to `worker`, rank 0's inbox (None if no GPU decodes): while the engine is idle, encode the first new JPEG of a request while it
    is hashed and its prompt is built. It affects no decision: a worker that has not encoded the image when a plan names it, or to another
    size, does so then. As a request's own size limits arrive later, `geometry` is that of the last request."""

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


class Image:
    """One image of one request. Its interface is that of all media."""

    kind: MediaKind = "image"
    header: Header  # after `encode`
    # After `load`:
    hash: bytes  # hash of its encoded bytes and every processing parameter
    source: ImageSource
    grid: Grid
    num_tokens: int

    def __init__(
        self, *, sources: Sources, inspector: Inspector, decoders: Decoders, early: EarlyReads, ref: MediaRef, is_frame: bool = False
    ):
        self._inspector, self._decoders, self._early = inspector, decoders, early
        self.file = File(sources, ref, self._look)
        self._is_frame = is_frame  # not encoded alone
        self.index = 0  # in its request
        self._ticket = 0  # ticket of an early read by rank 0

    @property
    def num_bytes(self) -> int:
        """Return the memory that `start` takes at most."""
        return self.file.num_bytes

    def start(self) -> bool:
        """Start to load the payload. Return whether there is memory for it now."""
        payload, early = self.file.ref.payload, self._early
        at_once, early.is_urgent = early.is_urgent and payload is not None and payload.length <= AT_ONCE_BYTES, False
        return self.file.start(at_once)

    async def load(self) -> None:
        """RequestError, ArenaFull or ArenaTooSmall."""
        with naming(f"Image {self.index + 1}"):
            encoded = await self.encode()
            await self.file.keep()
            self._settle(encoded)

    async def encode(self) -> GrowingRegion:
        """Run the first part of `load`: payload or URL -> encoded."""
        encoded = await self.file.load()
        header, headers = self.file.header, self._decoders.headers
        if header is None:
            header = headers.get(self.file.digest) or await self._decoders.read_header(encoded)
            self._inspector.check_size(header.height, header.width)
            headers[self.file.digest] = header
        self.header = header
        return encoded

    @property
    def visual(self) -> Visual:
        return Visual(self.kind, [self.num_tokens])

    def spans(self, starts: list[int]) -> list[ImageSpan]:
        """Return a span of placeholders per item; they begin at `starts`."""
        return [ImageSpan(self.hash, starts[0], self.num_tokens, self.grid, self.source)]

    @property
    def item_bytes(self) -> int:
        """Return the size of an item's pixels, if it is a file."""
        return 3 * self.source.height * self.source.width

    async def decode(self, items: Sequence[int], offset: int) -> list[ImageSource]:
        """Write the RGB of these items consecutively to the arena. RequestError."""
        size = self.source.height, self.source.width
        with naming(f"Image {self.index + 1}"):
            await self.write(offset, size)
        self.file.free()  # pixels take its place
        return [ImageSource("rgb", Region(PROCESSOR_ARENA, offset, self.item_bytes), *size)]

    async def write(self, offset: int, size: tuple[int, int]) -> None:
        """Write upright RGB of this size to the arena."""
        assert self.file.encoded is not None
        await self._decoders.decode(self.header, self.file.encoded, offset, size)

    async def release(self) -> None:
        """Free all memory as soon as no thread uses it. The image may start again afterwards."""
        await self.file.release()

    def _look(self, encoded: GrowingRegion) -> Header | None:
        """Return the header of a baseline JPEG, and announce it to rank 0."""
        header = self._inspector.plain_header(encoded.view)
        if header is not None and not self._is_frame:
            self._ticket = self._early.announce(encoded.view, self._jpeg_source(header, encoded))
        return header

    def _settle(self, encoded: GrowingRegion) -> None:
        """encoded -> jpeg or file"""
        header, inspector = self.header, self._inspector
        geometry = self._early.geometry = inspector.geometry_of(self.file.ref)
        self.hash = inspector.identity(self.file.digest, geometry)
        self.grid = inspector.grid(geometry, header.height, header.width)
        self.num_tokens = geometry.num_tokens(self.grid)
        if header.stays_encoded:
            self.source = self._jpeg_source(header, encoded)
        else:
            size = inspector.size_for_workers(geometry, header.height, header.width)
            self.source = ImageSource("file", encoded.wire(), *size)

    def _jpeg_source(self, header: Header, encoded: GrowingRegion) -> ImageSource:
        return ImageSource("jpeg", encoded.wire(), header.height, header.width, header.orientation, self._ticket)


@contextlib.contextmanager
def naming(medium: str) -> Iterator[None]:
    """Add the name of the medium to errors."""
    try:
        yield
    except RequestError as error:
        raise RequestError.of(msgspec.structs.replace(error.info, message=f"{medium}: {error.info.message}.", param=PROMPT)) from error
