"""Images of requests, each owned by one object from its payload to its release.

    payload, URL ──▶ encoded ─┬▶ jpeg: a plain one stays as it is
      (media pool: fetch,     └▶ file: decoded if the scheduler requests the pixels (decoders) ──▶ rgb
       base64, header, hash)
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

import msgspec

from engine.wire.messages import PROCESSOR_ARENA, ImageSource, ImageSpan, MediaRef, Region
from models.config.types import MediaKind
from models.media.geometry import Grid
from server.errors import PROMPT, RequestError
from server.processor.media.allocator import wire
from server.processor.media.decoders import Decoders
from server.processor.media.early import EarlyReads
from server.processor.media.inspect import Header, Inspector
from server.processor.media.sources import File, Sources
from server.processor.text.prompt import Visual
from server.region import GrowingRegion

AT_ONCE_BYTES = 1 << 20  # of base64 that the event loop decodes itself (in 0.3 ms) while the device is idle


class Image:
    """One image of one request. Its interface is that of all media."""

    kind: MediaKind = "image"
    counts: Mapping[str, int] = MappingProxyType({})  # for `Stages.counts`
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
            self.source = ImageSource("file", wire(encoded), *size)

    def _jpeg_source(self, header: Header, encoded: GrowingRegion) -> ImageSource:
        return ImageSource("jpeg", wire(encoded), header.height, header.width, header.orientation, self._ticket)


@contextlib.contextmanager
def naming(medium: str) -> Iterator[None]:
    """Add the name of the medium to errors."""
    try:
        yield
    except RequestError as error:
        raise RequestError.of(msgspec.structs.replace(error.info, message=f"{medium}: {error.info.message}.", param=PROMPT)) from error
