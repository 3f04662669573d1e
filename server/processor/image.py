"""Images of requests, each owned by one object from its payload to its release. Used by `server/processor/{intake,output}.py`.

    payload, URL ──▶ encoded ─┬▶ jpeg: a plain one stays as it is
      (media pool: fetch,     ├▶ file: decoded before, only the scheduler can tell whether its pixels are needed ──▶ rgb
       base64, header, hash)  └▶ rgb: a new one is decoded at once, so that damage is refused early (decoders)           ... ──▶ released

The event loop allocates; pool threads fill. Nothing is given back while a thread may still read or write it.
"""

import asyncio
import contextlib
import math
from collections import OrderedDict
from collections.abc import Coroutine, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import numpy as np

from engine.arena import ArenaFull, ArenaTooSmall, ArenaView
from engine.config import EngineConfig
from engine.messages import PROCESSOR_ARENA, ImageSource, ImageSpan, MediaRef
from engine.messages import Region as WireRegion
from engine.plain_jpeg import is_jpeg
from models.geometry import Grid
from server.checkpoint import Checkpoint
from server.errors import PROMPT, RequestError
from server.processor.base64_text import decode_base64, decode_data_url, decode_usual_base64
from server.processor.decoders import Decoders
from server.processor.early import EarlyReads, fingerprint
from server.processor.fetch import Fetcher
from server.processor.inspect import Allowance, Header, Inspector
from server.processor.named import NamedImages
from server.processor.pixels import DecodedSize
from server.processor.room import Room
from server.processor.threads import result_of, run, settled
from server.region import Region

FIRST_DOWNLOAD_BYTES = 1 << 20
AT_ONCE_BYTES = 1 << 20  # of base64 that the event loop itself takes up when a device waits for it: in a third of a millisecond
NUM_REMEMBERED = 4096  # files that were decoded before; what is forgotten is decoded once more


class ImageTools:
    """What all images share: memory, threads, limits, and which files were decoded before. Make it inside a running event loop."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, bodies: ArenaView, room: Room, early: EarlyReads, gpu_decodes: bool
    ):
        self.bodies = bodies
        self.room = room
        self.early = early
        self.inspector = Inspector(config, checkpoint, gpu_decodes)
        self.fetcher = Fetcher(config)
        self.named = NamedImages()
        self.media_pool = ThreadPoolExecutor(config.media_pool_size, "media")
        self.decoders = Decoders(config, room.arena)
        self.num_decoded = 0  # images that became RGB here
        self._upright_sizes: OrderedDict[bytes, DecodedSize] = OrderedDict()  # of decoded files by hash, least recently used first

    async def close(self) -> None:
        self.media_pool.shutdown(wait=False, cancel_futures=True)
        await self.decoders.close()
        await self.fetcher.close()

    def known_size(self, digest: bytes) -> DecodedSize | None:
        """The size of a file that was decoded before."""
        size = self._upright_sizes.get(digest)
        if size is not None:
            self._upright_sizes.move_to_end(digest)
        return size

    def note_decoded(self, digest: bytes, size: DecodedSize) -> None:
        self.num_decoded += 1
        self._upright_sizes[digest] = size
        self._upright_sizes.move_to_end(digest)
        if len(self._upright_sizes) > NUM_REMEMBERED:
            self._upright_sizes.popitem(last=False)


class Image:
    """One image of one request. `hash`, which covers its encoded bytes and every processing parameter, `source` and `grid` are there after
    `load`. Whatever happens, `release` must be awaited once."""

    hash: bytes
    source: ImageSource
    grid: Grid
    num_tokens: int

    def __init__(self, tools: ImageTools, ref: MediaRef):
        self._tools = tools
        self._ref = ref
        self.num_bytes = 0 if ref.payload is None else _decoded_bytes(ref.payload)  # of the arena, at least, when it is loaded
        self._index = 0  # in its request
        self._digest = b""  # of the encoded bytes
        self._header: Header | None = None  # when they are there
        self._ticket = 0  # under which rank 0 reads it already
        self._encoded: Region | None = None
        self._job: Future[tuple[bytes, Header]] | None = None  # that takes the payload
        self._pixels: Region | None = None
        self._task: asyncio.Task[None] | None = None  # works ahead, or on pixels

    def start(self) -> None:
        """Takes the payload up, if there is one, also of a body that still arrives. How that ends is the business of `load`."""
        if self._ref.payload is not None and self._task is None:
            with contextlib.suppress(ArenaFull, ArenaTooSmall):
                self._take_payload(self._ref.payload)  # now: a thread begins while others still have the event loop
            self._task = _start(self._encode())

    async def load(self, index: int, ref: MediaRef, allowance: Allowance) -> None:
        """As image `index` of its request, which has this allowance, until the scheduler may have it. RequestError, ArenaFull or
        ArenaTooSmall."""
        self._index, self._ref = index, ref
        with self._named():
            if self._task is not None:
                with contextlib.suppress(ArenaFull):  # there may be room by now
                    await self._task
            if self._header is None:
                async with allowance.downloads if self._ref.payload is None else contextlib.nullcontext():
                    await self._encode()
            assert self._header is not None
            allowance.take(self._header)
            if ref.name is not None:
                encoded = self._encoded
                assert encoded is not None
                self._tools.named.put(ref.name, await run(self._tools.media_pool, lambda: bytes(encoded.view)))
            await self._settle()

    def span(self, start: int) -> ImageSpan:
        """What the scheduler gets: the image's placeholders begin at token `start`."""
        return ImageSpan(self.hash, start, self.num_tokens, self.grid, self.source)

    def make_pixels(self) -> asyncio.Task[None]:
        """RGB of a file, once; room for it is waited for, because the request may have streamed text already. Errors as with `load`;
        cancelled when the image is released first."""
        assert self.source.encoding == "file"
        self._task = _start(self._make_pixels())
        return self._task

    async def release(self) -> None:
        """Gives everything back as soon as no thread works for this image."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._job is not None:  # whose task may have ended before it began
            await settled(self._job)
        self._task = self._job = None  # what they raised names this image
        for region in (self._encoded, self._pixels):
            if region is not None:
                self._tools.room.give_back(region)

    async def _encode(self) -> None:
        """payload or URL -> encoded"""
        payload, tools = self._ref.payload, self._tools
        if payload is not None:
            self._digest, header = await result_of(self._job or self._take_payload(payload))
        else:
            await self._fetch()
            self._digest, header = await run(tools.media_pool, self._inspect)
        self._header = header
        assert self._encoded is not None
        self._encoded.trim()

    def _take_payload(self, payload: WireRegion) -> "Future[tuple[bytes, Header]]":
        """Base64 from a request body, decoded into our arena and looked at in one go. Raises ArenaFull or ArenaTooSmall."""
        tools = self._tools
        text = tools.bodies.view(payload.offset, payload.length)
        encoded = self._encoded = tools.room.take(_decoded_bytes(payload))
        room = encoded.room
        ahead = self._look_at_once(text, room) if payload.length <= AT_ONCE_BYTES and tools.early.is_urgent() else None

        def job() -> tuple[bytes, Header]:
            if ahead is None:
                encoded.used = _copy(decode_base64(text), room)
            header = ahead or self._look()
            return tools.inspector.identify(encoded.view, header), header

        self._job = tools.media_pool.submit(job)
        return self._job

    def _look_at_once(self, text: memoryview, room: memoryview) -> Header | None:
        """The start of `_take_payload`'s job in the event loop, since a change of threads takes longer; only for usual base64 of a JPEG
        without faults, which is bounded."""
        assert self._encoded is not None
        data = decode_usual_base64(text)
        if data is None or not is_jpeg(memoryview(data)):
            return None
        self._encoded.used = _copy(data, room)
        with contextlib.suppress(RequestError):  # the job meets it again
            return self._look()
        return None

    def _look(self) -> Header:
        """The header. What rank 0 can begin with, it hears of before anything else is done."""
        assert self._encoded is not None
        data, tools = self._encoded.view, self._tools
        header = tools.inspector.read_header(data)
        if header.stays_encoded:
            self._ticket = tools.early.announce(fingerprint(data), self._jpeg_source(header))
        return header

    def _inspect(self) -> tuple[bytes, Header]:
        """Digest and header, in a pool."""
        assert self._encoded is not None
        header = self._look()
        return self._tools.inspector.identify(self._encoded.view, header), header

    async def _fetch(self) -> None:
        tools, ref = self._tools, self._ref
        url = ref.url or ""
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            encoded = self._encoded = tools.room.take(FIRST_DOWNLOAD_BYTES)
            await tools.fetcher.download(url, encoded.append)
        else:
            if ref.url is None:
                data = tools.named.get(ref.name or b"")
                if data is None:
                    raise RequestError(400, "no image is known by this uuid (any more): send it with its URL", code="unknown_uuid")
            else:
                read = decode_data_url if scheme == "data" else tools.fetcher.read_local
                data = await run(tools.media_pool, lambda: read(url))
            encoded = self._encoded = tools.room.take(len(data))
            encoded.append(data)

    async def _settle(self) -> None:
        """encoded -> jpeg, file or rgb"""
        header, encoded, inspector = self._header, self._encoded, self._tools.inspector
        assert header is not None and encoded is not None
        geometry = self._geometry = inspector.geometry_of(self._ref)
        inspector.grid(geometry, header.height, header.width)  # before anything is decoded
        self._tools.early.geometry = geometry
        self.hash = inspector.identity(self._digest, geometry)
        known = self._tools.known_size(self._digest)
        if header.stays_encoded:
            size = DecodedSize(header.height, header.width)
            self.source = self._jpeg_source(header)
        elif known is not None:
            size = known
            self.source = _source("file", encoded, *inspector.size_for_workers(geometry, size.height, size.width))
        else:
            self._tools.decoders.check(header)
            self.num_bytes = self._num_pixel_bytes(header)
            size = await self._decode(encoded, self._tools.room.take(self.num_bytes))
        self.grid = inspector.grid(geometry, size.height, size.width)
        self.num_tokens = geometry.num_tokens(self.grid)

    def _jpeg_source(self, header: Header) -> ImageSource:
        assert self._encoded is not None
        region = WireRegion(PROCESSOR_ARENA, self._encoded.offset, self._encoded.used)
        return ImageSource("jpeg", region, header.height, header.width, header.orientation, self._ticket)

    async def _make_pixels(self) -> None:
        """file -> rgb"""
        assert self._encoded is not None and self._header is not None
        with self._named():
            await self._decode(self._encoded, await self._tools.room.take_patiently(self._num_pixel_bytes(self._header)))

    def _num_pixel_bytes(self, header: Header) -> int:
        return 3 * math.prod(self._tools.inspector.size_for_workers(self._geometry, header.height, header.width))

    async def _decode(self, encoded: Region, pixels: Region) -> DecodedSize:
        self._pixels = pixels
        header, tools = self._header, self._tools
        assert header is not None
        stored = tools.inspector.size_for_workers(self._geometry, header.height, header.width)
        size = await tools.decoders.decode(header, encoded, pixels, stored)
        pixels.used = 3 * math.prod(stored)
        self._encoded = None
        tools.room.give_back(encoded)
        tools.note_decoded(self._digest, size)
        self.source = _source("rgb", pixels, *tools.inspector.size_for_workers(self._geometry, size.height, size.width))
        return size

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Tells the client which image of its request an error is about."""
        try:
            yield
        except RequestError as error:
            info = error.info
            message = f"Image {self._index + 1}: {info.message}."
            raise RequestError(info.status, message, PROMPT, info.code, info.retry_after) from error


async def release_all(images: Iterable[Image]) -> None:
    """Of all of them, whether or not one is still worked on."""
    await asyncio.gather(*(image.release() for image in images))


def _source(encoding: Literal["rgb", "file"], region: Region, height: int, width: int) -> ImageSource:
    return ImageSource(encoding, WireRegion(PROCESSOR_ARENA, region.offset, region.used), height, width)


def _copy(data: bytes, room: memoryview) -> int:
    """Their number. numpy copies without the interpreter lock; a slice assignment would hold it, and with it all other threads."""
    np.copyto(np.frombuffer(room[: len(data)], np.uint8), np.frombuffer(data, np.uint8))
    return len(data)


def _decoded_bytes(payload: WireRegion) -> int:
    """What base64 of this length may become."""
    return 3 * (payload.length // 4 + 1)


def _start(work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    task = asyncio.create_task(work)
    task.add_done_callback(lambda task: task.cancelled() or task.exception())  # reported if somebody asks for it
    return task
