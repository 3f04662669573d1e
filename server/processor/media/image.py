"""Images of requests, each owned by one object from its payload to its release.

    payload, URL ──▶ encoded ─┬▶ jpeg: a plain one stays as it is
      (media pool: fetch,     └▶ file: decoded if the scheduler requests the pixels (decoders) ──▶ rgb
       base64, header, hash)

The event loop allocates; pool threads fill. Nothing is given back while a thread may still read or write it.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType

import msgspec

from engine.wire.arena import ALIGNMENT, ArenaFull, ArenaTooSmall
from engine.wire.messages import PROCESSOR_ARENA, ImageSource, ImageSpan, MediaRef, Region
from models.config.types import MediaKind
from models.media.geometry import Grid
from server.errors import PROMPT, RequestError
from server.processor.media.allocator import wire
from server.processor.media.decoders import Decoders
from server.processor.media.early import EarlyReads
from server.processor.media.inspect import Allowance, Header, Inspector
from server.processor.media.sources import Sources
from server.processor.text.prompt import Visual
from server.processor.threads import result_of, settled
from server.region import GrowingRegion

AT_ONCE_BYTES = 1 << 20  # of base64 that the event loop decodes itself (in 0.3 ms) while the device is idle


class Image:
    """One image of one request: see `Medium`."""

    kind: MediaKind = "image"
    counts: Mapping[str, int] = MappingProxyType({})
    # After `load`:
    hash: bytes  # hash of its encoded bytes and every processing parameter
    source: ImageSource
    grid: Grid
    num_tokens: int
    # After `encode`:
    header: Header
    digest: bytes  # hash of the encoded bytes

    def __init__(
        self, *, sources: Sources, inspector: Inspector, decoders: Decoders, early: EarlyReads, ref: MediaRef, is_frame: bool = False
    ):
        self._sources, self._inspector, self._decoders, self._early = sources, inspector, decoders, early
        self._allocator = sources.allocator
        self.ref = ref
        self._is_frame = is_frame  # not encoded alone
        self.index = 0  # in its request
        self.num_bytes = 0 if ref.payload is None else decoded_bytes(ref.payload) + ALIGNMENT
        self._ticket = 0  # ticket of an early read by rank 0
        self.encoded: GrowingRegion | None = None
        self._job: Future[tuple[bytes, Header | None]] | None = None  # decodes the payload

    def start(self) -> bool:
        """Start to decode the payload if there is memory for it now; errors are raised by `load`."""
        if self.ref.payload is not None and self._job is None and not self._allocator.is_short:
            with contextlib.suppress(ArenaFull, ArenaTooSmall):
                self._fill(self._allocator.allocate(decoded_bytes(self.ref.payload)))
        return self.ref.payload is None or self._job is not None

    async def begin(self) -> None:
        if self.ref.payload is not None and self._job is None:
            self._fill(await self._allocator.allocate_when_free(decoded_bytes(self.ref.payload)))

    async def load(self, allowance: Allowance) -> None:
        with naming(f"Image {self.index + 1}"):
            await self.encode(allowance)
            assert self.encoded is not None
            await self._sources.keep(self.ref.name, self.digest, self.encoded)
            self._settle(self.encoded)

    async def encode(self, allowance: Allowance) -> None:
        """Run the first part of `load`: payload or URL -> encoded."""
        if self._job is None:
            async with allowance.downloads:
                await self._sources.fetch(self.ref, self._hold)
            self._job = self._sources.pool.submit(lambda: self._identify(self._look()))
        digest, header = await result_of(self._job)
        assert self.encoded is not None
        self.encoded.trim()
        if header is None:
            header = self._decoders.headers.get(digest) or await self._decoders.read_header(self.encoded)
            self._inspector.check_size(header.height, header.width)
            self._decoders.headers[digest] = header
        self.digest, self.header = digest, header
        allowance.take(header)

    @property
    def visual(self) -> Visual:
        return Visual(self.kind, [self.num_tokens])

    def spans(self, starts: list[int]) -> list[ImageSpan]:
        return [ImageSpan(self.hash, starts[0], self.num_tokens, self.grid, self.source)]

    @property
    def item_bytes(self) -> int:
        return 3 * self.source.height * self.source.width

    async def decode(self, items: Sequence[int], offset: int) -> list[ImageSource]:
        size = self.source.height, self.source.width
        with naming(f"Image {self.index + 1}"):
            assert self.encoded is not None
            await self._decoders.decode(self.header, self.encoded, offset, size)
            self._allocator.free(self.encoded)
            self.encoded = None  # pixels take its place
        return [ImageSource("rgb", Region(PROCESSOR_ARENA, offset, self.item_bytes), *size)]

    async def release(self) -> None:
        if self._job is not None:
            await settled(self._job)
        if self.encoded is not None:
            self._allocator.free(self.encoded)
        self._job = self.encoded = None  # the job's exception names this image

    def _hold(self, region: GrowingRegion) -> GrowingRegion:
        self.encoded = region
        return region

    def _fill(self, encoded: GrowingRegion) -> None:
        """Decode the base64 of a body and read the header."""
        payload, early = self.ref.payload, self._early
        assert payload is not None
        unpack_bytes = self._sources.unpacking(payload, self._hold(encoded))

        def unpack() -> Header | None:
            unpack_bytes()
            return self._look()

        is_urgent, early.is_urgent = early.is_urgent and payload.length <= AT_ONCE_BYTES, False
        begun = []
        if is_urgent:  # here in the event loop, since a change of threads takes longer
            with contextlib.suppress(RequestError):  # the job raises it again
                begun.append(unpack())
        self._job = self._sources.pool.submit(lambda: self._identify(begun[0] if begun else unpack()))

    def _look(self) -> Header | None:
        """Return the header of a baseline JPEG, and announce it to rank 0."""
        assert self.encoded is not None
        data = self.encoded.view
        header = self._inspector.plain_header(data)
        if header is not None and not self._is_frame:
            self._ticket = self._early.announce(data, self._jpeg_source(header, self.encoded))
        return header

    def _identify(self, header: Header | None) -> tuple[bytes, Header | None]:
        assert self.encoded is not None
        return self._inspector.identify(self.encoded.view, header is not None), header

    def _settle(self, encoded: GrowingRegion) -> None:
        """encoded -> jpeg or file"""
        header, inspector = self.header, self._inspector
        geometry = self._early.geometry = inspector.geometry_of(self.ref)
        self.hash = inspector.identity(self.digest, geometry)
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
def naming(medium: str, codes: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Add the name of the medium to errors; `codes` maps error codes to this medium's codes."""
    try:
        yield
    except RequestError as error:
        info = error.info
        code = codes.get(info.code or "", info.code)
        raise RequestError.of(msgspec.structs.replace(info, message=f"{medium}: {info.message}.", param=PROMPT, code=code)) from error


def decoded_bytes(payload: Region) -> int:
    """Return the maximum number of bytes that the payload decodes to."""
    return 3 * (payload.length // 4 + 1)
