"""Images of a request: from base64, data, http(s) and file URLs to bytes that the workers can use. Called by `server/processor.py`.

    source ──▶ encoded bytes in the arena ──▶ header, limits, sha256 ──▶ plain JPEG: stays as it is
       (media pool: fetch, base64, hash)                            ├──▶ decoded before: stays a file, RGB if the scheduler wants it
                                                                    └──▶ else: RGB in the arena (processing pool)

Only the scheduler can tell whether the pixels of a known file are needed. A new one is decoded at once, so that damage is refused early.
The event loop allocates; pool threads fill. A region is never given back while a thread may still write to it (`_run`).
"""

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, TypeVar

import msgspec
import numpy as np

from engine.arena import ArenaFull, ArenaView
from engine.config import EngineConfig
from engine.messages import PROCESSOR_ARENA, ImageSource, MediaRef
from engine.messages import Region as WireRegion
from engine.plain_jpeg import has_end, has_too_many_scans, is_jpeg, parse_plain_jpeg
from models.geometry import Grid, VisionGeometry
from server.base64_text import decode_base64, decode_data_url
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.fetch import Fetcher
from server.pixels import DecodedSize, decode_rgb, read_orientation, read_size
from server.region import Holdings, Region

T = TypeVar("T")

PROCESSING_VERSION = 1  # part of every image's identity: raise it when the same bytes lead to other pixels
FIRST_DOWNLOAD_BYTES = 1 << 20
FINGERPRINT_BYTES = 64
NUM_REMEMBERED = 4096  # files that were decoded before; what is forgotten is decoded once more


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """An image that is ready for the scheduler. `hash` covers its encoded bytes and every processing parameter."""

    hash: bytes
    source: ImageSource
    grid: Grid
    num_tokens: int
    file: Region | None = None  # where the encoded bytes are while the source is a file


@dataclass(frozen=True, slots=True)
class _Header:
    """What the header says. Sizes of a plain JPEG are after orientation, those of other files before."""

    stays_encoded: bool
    height: int
    width: int
    orientation: int = 1


@dataclass(frozen=True, slots=True)
class Glimpse:
    """What is known of an image before its hash. `source` is that of a plain JPEG, which stays as it is.

    Different images may have one `fingerprint`: it is good for guesses only.
    """

    fingerprint: bytes
    source: ImageSource | None


_Facts = tuple[bytes, _Header]  # the image's hash, and what its header says
Beginning = asyncio.Task[tuple[Region, _Facts]]


class Inspector:
    """Looks at encoded bytes in pool threads: limits and identity. Immutable."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint):
        self.geometry: VisionGeometry = checkpoint.geometry
        self._max_pixels = config.max_image_pixels
        self._max_tokens = config.max_num_encoder_tokens
        value_bytes = 4 if config.dtype == "float32" else 2
        if config.image_cache_bytes is not None:
            self._max_tokens = min(self._max_tokens, config.image_cache_bytes // (checkpoint.num_values_per_image_token * value_bytes))
        geometry = self.geometry
        sizes = (geometry.patch_size, geometry.merge_size, geometry.temporal_patch_size, geometry.min_pixels, geometry.max_pixels)
        self._parameters = msgspec.msgpack.encode((PROCESSING_VERSION, sizes))

    def inspect(self, data: memoryview) -> _Facts:
        """The hash and the header. Errors as `read_header`."""
        header = self.read_header(data)
        return self.identify(data, header), header

    def read_header(self, data: memoryview) -> _Header:
        """Raises RequestError 400 or 422 in words that follow "Image n: "."""
        if is_jpeg(data):
            if not has_end(data):
                raise RequestError(422, "it is a truncated JPEG", code="invalid_image")
            plain = parse_plain_jpeg(data)
            if plain is not None:
                orientation = read_orientation(data) if plain.has_metadata else 1
                height, width = (plain.width, plain.height) if orientation >= 5 else (plain.height, plain.width)
                self.check_size(height, width)
                return _Header(True, height, width, orientation)
            if has_too_many_scans(data):
                raise RequestError(422, "it is a JPEG of more scans or segments than encoders write", code="invalid_image")
        height, width = read_size(data)
        self.check_size(height, width)
        return _Header(False, height, width)

    def check_size(self, height: int, width: int) -> None:
        """Limits on pixels, shape and tokens; all are the same for an image and its transpose."""
        if height * width > self._max_pixels:
            raise RequestError(400, f"it has {width}x{height} pixels, the limit is {self._max_pixels}", code="image_too_large")
        num_tokens = self.geometry.num_tokens(self.grid(height, width))
        if num_tokens > self._max_tokens:
            raise RequestError(400, f"it takes {num_tokens} tokens, the limit is {self._max_tokens}", code="image_too_large")

    def grid(self, height: int, width: int) -> Grid:
        try:
            return self.geometry.grid(height, width)
        except ValueError as error:
            raise RequestError(400, str(error), code="invalid_image") from None

    def identify(self, data: memoryview, header: _Header) -> bytes:
        """sha256 over length-framed fields, so that no two different inputs can read the same."""
        digest = hashlib.sha256()
        for field in (b"jpeg" if header.stays_encoded else b"rgb", self._parameters):
            digest.update(len(field).to_bytes(8, "little") + field)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        return digest.digest()


class MediaLoader:
    """Owns the pools; `bodies` is the api's arena. Make it inside a running event loop."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, bodies: ArenaView):
        self._bodies = bodies
        self._inspector = Inspector(config, checkpoint)
        self._fetcher = Fetcher(config)
        self._media_pool = ThreadPoolExecutor(config.media_pool_size, "media")
        self._processing_pool = ThreadPoolExecutor(config.processing_pool_size, "pixels")
        self._upright_sizes: OrderedDict[bytes, DecodedSize] = OrderedDict()  # of decoded files by hash, least recently used first
        self.num_decoded = 0  # images that became RGB here

    async def close(self) -> None:
        self._media_pool.shutdown(wait=False, cancel_futures=True)
        self._processing_pool.shutdown(wait=False, cancel_futures=True)
        await self._fetcher.close()

    def begin(self, payload: WireRegion, holdings: Holdings, note: Callable[[Glimpse], None]) -> Beginning:
        """Decodes an image, also of a body that still arrives. Before anything is given back, the task must have ended.

        `note` is called in the event loop, before the hash is there, unless the image is refused.
        """
        task = asyncio.create_task(self._take_payload(payload, holdings, note))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # reported if `load` asks for it
        return task

    async def load(self, index: int, ref: MediaRef, holdings: Holdings, begun: Mapping[int, Beginning]) -> LoadedImage:
        """Image `index` of a request, `begun` by offset of its payload; its region is among the holdings, also when this fails.
        RequestError, ArenaFull or ArenaTooSmall."""
        with _named(index):
            if ref.payload is not None:
                encoded, facts = await self._go_on(ref.payload, holdings, begun[ref.payload.offset])
            else:
                encoded = await self._fetch(ref.url or "", holdings)
                facts = await _run(self._media_pool, lambda: self._inspector.inspect(encoded.view))
            return await self._finish(encoded, facts, holdings)

    async def decode(self, index: int, image: LoadedImage, holdings: Holdings) -> ImageSource:
        """The RGB of image `index`, which `load` left a file; once for an image. Regions and errors as with `load`."""
        assert image.file is not None
        with _named(index):
            return await self._decode(image.file, image.hash, image.source.height * image.source.width, holdings)

    async def _go_on(self, payload: WireRegion, holdings: Holdings, begun: Beginning) -> tuple[Region, _Facts]:
        try:
            return await begun
        except ArenaFull:  # there may be room by now
            return await self._take_payload(payload, holdings, lambda _: None)

    async def _take_payload(self, payload: WireRegion, holdings: Holdings, note: Callable[[Glimpse], None]) -> tuple[Region, _Facts]:
        """Base64 from a request body, decoded into our arena and looked at in one go."""
        text = self._bodies.view(payload.offset, payload.length)
        encoded = holdings.take(3 * (payload.length // 4 + 1))
        room = encoded.room
        loop = asyncio.get_running_loop()

        def job() -> tuple[int, _Facts]:
            data = decode_base64(text)
            # numpy copies without the interpreter lock; a slice assignment would hold it, and with it the other threads and the event loop
            np.copyto(np.frombuffer(room[: len(data)], np.uint8), np.frombuffer(data, np.uint8))
            kept = room[: len(data)]
            header = self._inspector.read_header(kept)
            source = _jpeg_source(encoded.offset, len(data), header) if header.stays_encoded else None
            loop.call_soon_threadsafe(note, Glimpse(_fingerprint(kept), source))
            return len(data), (self._inspector.identify(kept, header), header)

        encoded.used, facts = await _run(self._media_pool, job)
        encoded.trim()
        return encoded, facts

    async def _fetch(self, url: str, holdings: Holdings) -> Region:
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            encoded = holdings.take(FIRST_DOWNLOAD_BYTES)
            await self._fetcher.download(url, encoded.append)
        else:
            read = decode_data_url if scheme == "data" else self._fetcher.read_local
            data = await _run(self._media_pool, lambda: read(url))
            encoded = holdings.take(len(data))
            encoded.append(data)
        encoded.trim()
        return encoded

    async def _finish(self, encoded: Region, facts: _Facts, holdings: Holdings) -> LoadedImage:
        """Leaves a plain JPEG and a known file as they are; anything else becomes RGB and its encoded bytes are given back."""
        file = None
        digest, header = facts
        if header.stays_encoded:
            source = _jpeg_source(encoded.offset, encoded.used, header)
        elif digest in self._upright_sizes:
            self._upright_sizes.move_to_end(digest)
            size = self._upright_sizes[digest]
            file, source = encoded, _source("file", encoded, size.height, size.width)
        else:
            source = await self._decode(encoded, digest, header.height * header.width, holdings)
        grid = self._inspector.grid(source.height, source.width)
        return LoadedImage(digest, source, grid, self._inspector.geometry.num_tokens(grid), file)

    async def _decode(self, encoded: Region, digest: bytes, num_pixels: int, holdings: Holdings) -> ImageSource:
        pixels = holdings.take(3 * num_pixels)
        room = pixels.room
        size = await _run(self._processing_pool, lambda: decode_rgb(encoded.view, room))
        pixels.used = 3 * size.height * size.width
        holdings.drop(encoded)
        self.num_decoded += 1
        self._upright_sizes[digest] = size
        self._upright_sizes.move_to_end(digest)
        if len(self._upright_sizes) > NUM_REMEMBERED:
            self._upright_sizes.popitem(last=False)
        return _source("rgb", pixels, size.height, size.width)


def _jpeg_source(offset: int, length: int, header: _Header) -> ImageSource:
    return ImageSource("jpeg", WireRegion(PROCESSOR_ARENA, offset, length), header.height, header.width, header.orientation)


def _source(encoding: Literal["rgb", "file"], region: Region, height: int, width: int) -> ImageSource:
    return ImageSource(encoding, WireRegion(PROCESSOR_ARENA, region.offset, region.used), height, width)


def _fingerprint(data: memoryview) -> bytes:
    """The length, and some bytes of the middle and of the end: where encoders do not write what they always write."""
    middle = len(data) // 2
    return len(data).to_bytes(8, "little") + bytes(data[middle : middle + FINGERPRINT_BYTES]) + bytes(data[-FINGERPRINT_BYTES:])


@contextlib.contextmanager
def _named(index: int) -> Iterator[None]:
    """Tells the client which image of its request an error is about."""
    try:
        yield
    except RequestError as error:
        info = error.info
        raise RequestError(info.status, f"Image {index + 1}: {info.message}.", "messages", info.code, info.retry_after) from error


async def _run(pool: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """Runs a job in a pool. When cancelled, returns only after the job has: its memory may then be given back."""
    future = pool.submit(job)
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([waiter])
            waiter.exception()  # taken note of: nobody wants to know any more
        raise
