"""Images of requests, each owned by one object from its payload to its release.

    payload, URL ──▶ encoded ─┬▶ jpeg: a plain one stays as it is
      (media pool: fetch,     └▶ file: decoded if the scheduler requests the pixels (decoders) ──▶ rgb
       base64, header, hash)

The cost of every function in the processor is bounded, whatever the bytes are.
"""

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Iterator, Sequence

import msgspec
from cachetools import LRUCache

from engine.wire.arena import GrowingRegion
from engine.wire.config import EngineConfig
from engine.wire.ipc import Outbox
from engine.wire.jpeg import parse_plain_jpeg
from engine.wire.messages import MAX_EARLY_TOKENS, PROCESSOR_ARENA, ImageSource, ImageSpan, MediaRef, Prefetch, Region
from models.config.types import MediaKind
from models.media.geometry import Grid, VisionGeometry
from server.errors import PROMPT, RequestError
from server.processor.media.decoder import read_orientation
from server.processor.media.decoders import Decoders, Header
from server.processor.media.sources import File, Sources
from server.processor.text.prompt import Visual

NUM_REMEMBERED = 4096  # images seen before, which are usually encoded
MAX_PIXELS, MAX_BYTES = 1 << 24, 1 << 25  # held by a worker in addition to its planned memory
TAIL_BYTES = 64  # with the length they identify an image well enough for a hint
AT_ONCE_BYTES = 1 << 20  # of base64 that the event loop decodes itself (in 0.3 ms) while the device is idle
MAX_JPEG_PIXELS = 1 << 25  # maximum for a GPU, which takes 3 bytes per pixel; larger images are decoded by the processor
MAX_JPEG_PIXELS_HOST = 1 << 18  # maximum for a worker without a GPU decoder: a few milliseconds
SMALL_PIXELS = 1 << 18  # up to this size an image is not resized by the processor


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


class Images:
    """Limits of images, and what all of them share. `geometry`: the checkpoint's; `worker`: see `EarlyReads`."""

    def __init__(
        self, config: EngineConfig, geometry: VisionGeometry, sources: Sources, decoders: Decoders, worker: Outbox[Prefetch] | None
    ):
        self.sources, self.decoders, self.geometry = sources, decoders, geometry
        self.geometry = self.geometry_of(MediaRef(min_pixels=config.min_pixels, max_pixels=config.max_pixels))
        self.early = EarlyReads(worker, self.geometry)
        self._max_pixels = config.max_image_pixels
        self._max_jpeg_pixels = MAX_JPEG_PIXELS_HOST if worker is None else MAX_JPEG_PIXELS

    def plain_header(self, data: memoryview) -> Header | None:
        """Return the header of a JPEG that stays encoded, None for other files. RequestError 400 or 422 with a text that follows "Image n:
        "."""
        plain = parse_plain_jpeg(data)
        if plain is None or plain.height * plain.width > self._max_jpeg_pixels:
            return None
        orientation = read_orientation(data) if plain.has_metadata else 1
        size = (plain.width, plain.height) if orientation >= 5 else (plain.height, plain.width)
        return self.checked(Header(True, *size, orientation))

    def checked(self, header: Header) -> Header:
        """RequestError 400 for too many pixels."""
        if header.height * header.width > self._max_pixels:
            words = f"it has {header.width}x{header.height} pixels, the limit is {self._max_pixels}"
            raise RequestError(400, words, code="image_too_large")
        return header

    def geometry_of(self, ref: MediaRef) -> VisionGeometry:
        """Return the geometry with the request's pixel limits for this image, which override the server's. RequestError 400."""
        least = ref.min_pixels or min(self.geometry.min_pixels, ref.max_pixels or self.geometry.min_pixels)
        most = ref.max_pixels or max(self.geometry.max_pixels, least)
        if ref.cap is not None:
            least, most = min(least, ref.cap), min(most, ref.cap)
        if least > most:
            raise RequestError(400, f"its min_pixels of {least} exceed its max_pixels of {most}", code="invalid_value")
        return dataclasses.replace(self.geometry, min_pixels=least, max_pixels=most)


class Image:
    """One image of one request. Its interface is that of all media."""

    kind: MediaKind = "image"
    header: Header | None = None  # after `encode`
    # After `load`:
    hash: bytes  # hash of its encoded bytes and of limits that differ from the server's
    source: ImageSource
    grid: Grid
    num_tokens: int

    def __init__(self, images: Images, ref: MediaRef):
        self._images = images
        self.file = File(images.sources, ref, self._look)
        self.index = 0  # in its request
        self._ticket = 0  # ticket of an early read by rank 0

    @property
    def num_bytes(self) -> int:
        """Return the memory that `start` takes at most."""
        return self.file.num_bytes

    def start(self) -> bool:
        """Start to load the payload. Return whether there is memory for it now."""
        payload, early = self.file.ref.payload, self._images.early
        at_once, early.is_urgent = early.is_urgent and payload is not None and payload.length <= AT_ONCE_BYTES, False
        return self.file.start(at_once)

    async def load(self) -> None:
        """RequestError, ArenaFull or ArenaTooSmall."""
        with naming(f"Image {self.index + 1}"):
            encoded, header, images = *await self.encode(), self._images
            geometry = images.early.geometry = images.geometry_of(self.file.ref)
            limits = b"" if geometry == images.geometry else b"%d to %d" % (geometry.min_pixels, geometry.max_pixels)
            self.hash = hashlib.sha256(self.file.digest + limits).digest()
            try:
                self.grid = geometry.grid(header.height, header.width)
            except ValueError as error:
                raise RequestError(400, str(error), code="unsupported_image") from None
        self.num_tokens = geometry.num_tokens(self.grid)
        if header.stays_encoded:
            self.source = self._jpeg_source(header, encoded)
        else:
            target = self.grid[1] * geometry.patch_size, self.grid[2] * geometry.patch_size
            is_large = header.num_pixels > max(SMALL_PIXELS, 2 * target[0] * target[1])  # workers would resize it to `target`
            self.source = ImageSource("file", encoded.wire(), *(target if is_large else (header.height, header.width)))

    async def encode(self) -> tuple[GrowingRegion, Header]:
        """Run the first part of `load`: payload or URL -> encoded."""
        encoded, decoders = await self.file.load(), self._images.decoders
        if self.header is None:
            known = decoders.headers.get(self.file.digest)
            self.header = decoders.headers[self.file.digest] = known or self._images.checked(await decoders.read_header(encoded))
        return encoded, self.header

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
        assert self.file.encoded is not None and self.header is not None
        await self._images.decoders.decode(self.header, self.file.encoded, offset, size)

    async def release(self) -> None:
        """Free all memory as soon as no thread uses it. The image may start again afterwards."""
        await self.file.release()

    def _look(self, encoded: GrowingRegion) -> None:
        """Set the header of a baseline JPEG, and announce it to rank 0."""
        self.header = self._images.plain_header(encoded.view)
        if self.header is not None:
            self._ticket = self._images.early.announce(encoded.view, self._jpeg_source(self.header, encoded))

    def _jpeg_source(self, header: Header, encoded: GrowingRegion) -> ImageSource:
        return ImageSource("jpeg", encoded.wire(), header.height, header.width, header.orientation, self._ticket)


@contextlib.contextmanager
def naming(medium: str) -> Iterator[None]:
    """Add the name of the medium to errors."""
    try:
        yield
    except RequestError as error:
        raise RequestError.of(msgspec.structs.replace(error.info, message=f"{medium}: {error.info.message}.", param=PROMPT)) from error
