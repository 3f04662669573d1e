"""Images of requests, each owned by one object from its payload to its release.

    payload, URL ──▶ encoded ─┬▶ jpeg: a plain one stays as it is
      (media pool: fetch,     ├▶ file: decoded before, only the scheduler can tell whether its pixels are needed ──▶ rgb
       base64, header, hash)  └▶ rgb: a new one is decoded at once, so that damage is refused early (decoders)           ... ──▶ released

The event loop allocates; pool threads fill. Nothing is given back while a thread may still read or write it.
"""

import asyncio
import contextlib
import math
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from types import MappingProxyType

import msgspec

from engine.wire.arena import ArenaFull, ArenaTooSmall
from engine.wire.messages import ImageSource, ImageSpan, MediaRef
from engine.wire.messages import Region as WireRegion
from models.config.types import MediaKind
from models.media.geometry import Grid
from server.errors import PROMPT, RequestError
from server.processor.media.allocator import wire
from server.processor.media.decoders import Decoders, Size
from server.processor.media.early import EarlyReads
from server.processor.media.inspect import Allowance, Header, Inspector
from server.processor.media.sources import Sources
from server.processor.text.prompt import Visual
from server.processor.threads import result_of, run, settled
from server.region import Region

AT_ONCE_BYTES = 1 << 20  # of base64 that the event loop decodes itself (in 0.3 ms) while the device is idle


class Image:
    """One image of one request: see `Medium`."""

    kind: MediaKind = "image"
    # After `load`:
    hash: bytes  # hash of its encoded bytes and every processing parameter
    source: ImageSource
    grid: Grid
    num_tokens: int
    # After `encode`:
    encoded: Region
    header: Header
    digest: bytes = b""  # hash of the encoded bytes
    counts: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, *, sources: Sources, inspector: Inspector, decoders: Decoders, early: EarlyReads, ref: MediaRef, is_frame: bool = False
    ):
        self._sources, self._inspector, self._decoders, self._early = sources, inspector, decoders, early
        self._allocator = sources.allocator
        self.ref = ref
        self._is_frame = is_frame  # not encoded alone
        self.num_bytes = 0 if ref.payload is None else decoded_bytes(ref.payload)
        self._index = 0  # in its request
        self._ticket = 0  # ticket of an early read by rank 0
        self._regions: list[Region] = []  # regions to release
        self._job: Future[tuple[bytes, Header | None]] | None = None  # decodes the payload
        self._task: asyncio.Task[None] | None = None  # prepares in advance, or decodes pixels

    def start(self) -> None:
        """Start to decode the payload, if there is one; errors are raised by `load`."""
        if self.ref.payload is not None and self._task is None:
            with contextlib.suppress(ArenaFull, ArenaTooSmall):
                self._take_payload(self.ref.payload)  # at once: a thread starts while the event loop is busy
            self._task = start_task(self._encode())

    async def load(self, index: int, allowance: Allowance) -> None:
        self._index = index
        with naming(f"Image {self._index + 1}"):
            await self.encode(allowance)
            await self._sources.keep(self.ref.name, self.digest, self.encoded)
            await self._settle()

    async def encode(self, allowance: Allowance) -> None:
        """Run the first part of `load`, for an image or a frame that is checked elsewhere."""
        if self._task is not None:
            with contextlib.suppress(ArenaFull):  # there may be space by now
                await self._task
        if not self.digest:
            async with allowance.downloads if self.ref.payload is None else contextlib.nullcontext():
                await self._encode()
        allowance.take(self.header)

    @property
    def visual(self) -> Visual:
        return Visual(self.kind, [self.num_tokens])

    def spans(self, starts: list[int]) -> list[ImageSpan]:
        return [ImageSpan(self.hash, starts[0], self.num_tokens, self.grid, self.source)]

    def make_pixels(self, item: int = 0) -> asyncio.Task[None]:
        assert self.source.encoding == "file"
        self._task = start_task(self._make_pixels())
        return self._task

    def source_of(self, item: int) -> ImageSource:
        return self.source

    async def release(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._job is not None:  # the task may have been cancelled before it started
            await settled(self._job)
        self._task = self._job = None  # their exceptions name this image
        for region in self._regions:
            self._allocator.free(region)

    def _hold(self, region: Region) -> Region:
        self._regions.append(region)
        return region

    async def _encode(self) -> None:
        """payload or URL -> encoded"""
        payload = self.ref.payload
        if payload is not None:
            digest, header = await result_of(self._job or self._take_payload(payload))
        else:
            self.encoded = await self._sources.fetch(self.ref, self._hold)
            digest, header = await run(self._sources.pool, lambda: self._identify(self._look()))
        self.encoded.trim()
        if header is None:
            known = self._decoders.known.get(digest)
            header = known[0] if known is not None else await self._decoders.read_header(self.encoded)
            self._inspector.check_size(header.height, header.width)
        self.digest, self.header = digest, header

    def _take_payload(self, payload: WireRegion) -> "Future[tuple[bytes, Header | None]]":
        """Decode the base64 of a body into the arena and read the header. ArenaFull or ArenaTooSmall."""
        early = self._early
        self.encoded = self._hold(self._allocator.allocate(decoded_bytes(payload)))
        unpack_bytes = self._sources.unpacking(payload, self.encoded)

        def unpack() -> Header | None:
            unpack_bytes()
            return self._look()

        is_urgent, early.is_urgent = early.is_urgent and payload.length <= AT_ONCE_BYTES, False
        begun = []
        if is_urgent:  # here in the event loop, since a change of threads takes longer
            with contextlib.suppress(RequestError):  # the job raises it again
                begun.append(unpack())
        self._job = self._sources.pool.submit(lambda: self._identify(begun[0] if begun else unpack()))
        return self._job

    def _look(self) -> Header | None:
        """Return the header of a baseline JPEG, and announce it to rank 0."""
        data = self.encoded.view
        header = self._inspector.plain_header(data)
        if header is not None and not self._is_frame:
            self._ticket = self._early.announce(data, self._jpeg_source(header))
        return header

    def _identify(self, header: Header | None) -> tuple[bytes, Header | None]:
        return self._inspector.identify(self.encoded.view, header is not None), header

    async def _settle(self) -> None:
        """encoded -> jpeg, file or rgb"""
        header, inspector = self.header, self._inspector
        geometry = self._geometry = inspector.geometry_of(self.ref)
        self._stored = inspector.size_for_workers(geometry, header.height, header.width)  # also checks the grid, before decoding
        self._early.geometry = geometry
        self.hash = inspector.identity(self.digest, geometry)
        known = self._decoders.known.get(self.digest)
        if header.stays_encoded:
            size = header.height, header.width
            self.source = self._jpeg_source(header)
        elif known is not None:
            _, size = known
            self.source = ImageSource("file", wire(self.encoded), *inspector.size_for_workers(geometry, *size))
        else:
            self.num_bytes = 3 * math.prod(self._stored)
            size = await self._decode(self._allocator.allocate(self.num_bytes))
        self.grid = inspector.grid(geometry, *size)
        self.num_tokens = geometry.num_tokens(self.grid)

    def _jpeg_source(self, header: Header) -> ImageSource:
        return ImageSource("jpeg", wire(self.encoded), header.height, header.width, header.orientation, self._ticket)

    async def _make_pixels(self) -> None:
        """file -> rgb"""
        with naming(f"Image {self._index + 1}"):
            await self._decode(await self._allocator.allocate_when_free(3 * math.prod(self._stored)))

    async def _decode(self, pixels: Region) -> Size:
        self._hold(pixels)
        header = self.header
        size = await self._decoders.decode(header, self.encoded, (pixels.offset, pixels.capacity), self._stored)
        pixels.used = 3 * math.prod(self._stored)
        self._regions.remove(self.encoded)
        self._allocator.free(self.encoded)
        self._decoders.num_decoded += 1
        self._decoders.known[self.digest] = header, size
        self.source = ImageSource("rgb", wire(pixels), *self._inspector.size_for_workers(self._geometry, *size))
        return size


@contextlib.contextmanager
def naming(medium: str, codes: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """Add the name of the medium to errors; `codes` maps error codes to this medium's codes."""
    try:
        yield
    except RequestError as error:
        info = error.info
        code = codes.get(info.code or "", info.code)
        raise RequestError.of(msgspec.structs.replace(info, message=f"{medium}: {info.message}.", param=PROMPT, code=code)) from error


def decoded_bytes(payload: WireRegion) -> int:
    """Return the maximum number of bytes that the payload decodes to."""
    return 3 * (payload.length // 4 + 1)


def start_task(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # reported when it is used
    return task
