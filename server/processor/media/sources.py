"""Encoded bytes of media, from request bodies, URLs and earlier requests, and the memory of their requests.

The event loop allocates; pool threads fill. Nothing is given back while a thread may still write it.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import pybase64
from cachetools import LRUCache
from pydantic_core import from_json

from engine.wire.arena import ALIGNMENT, Arena, ArenaFull, ArenaTooSmall, ArenaView, GrowingRegion
from engine.wire.config import EngineConfig
from engine.wire.messages import MediaRef, Region
from server.errors import RequestError, invalid_image
from server.processor.media.fetch import Fetcher

FIRST_DOWNLOAD_BYTES = 1 << 20
NAMED_BYTES = 256 << 20  # bytes of media with names, on the heap
WHITE_SPACE = b" \t\r\n\v\f"
SPACES = bytes.maketrans(WHITE_SPACE, b" " * 6)  # `from_json` refuses line breaks
URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")

T = TypeVar("T")


class RegionAllocator:
    """Regions of the processor's arena: one half is for inputs, the other for decoded pixels. Requests that wait for inputs hold none, and
    those that wait for pixels no pixels, so that every wait ends."""

    def __init__(self, fd: int, size: int):
        half = size // 2 // ALIGNMENT * ALIGNMENT
        self.inputs, self.pixels = Arena(fd, half), Arena(fd, size, start=half)
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    def allocate(self, capacity: int) -> GrowingRegion:
        """Return a new region for inputs. Raise ArenaFull or ArenaTooSmall."""
        return GrowingRegion(self.inputs, capacity)

    async def reserve(self, capacity: int) -> GrowingRegion:
        """Return a region for all pixels of a request, after earlier calls got theirs. Raise ArenaTooSmall."""
        async with self._turn:
            while True:
                try:
                    return GrowingRegion(self.pixels, capacity)
                except ArenaFull:
                    await self.wait()

    async def wait(self) -> None:
        """Wait until a region is released."""
        self._released.clear()
        await self._released.wait()

    def free(self, region: GrowingRegion) -> None:
        """Release a region that no thread or process uses."""
        region.free()
        self._released.set()

    def is_empty(self) -> bool:
        return self.inputs.is_empty() and self.pixels.is_empty()


def decoded_bytes(payload: Region) -> int:
    """Return the maximum number of bytes that the payload decodes to."""
    return 3 * (payload.length // 4 + 1)


def decode_base64(text: memoryview | bytes) -> bytes:
    """Decode base64 from a JSON string, also with escapes, line breaks, the URL-safe alphabet or without padding. RequestError 422."""
    data: bytes
    try:
        data = pybase64.b64decode(text, validate=True)
    except ValueError:
        try:
            plain = bytes(text)
            if b"\\" in plain:  # `json.loads` would need sixty times the memory
                plain = from_json(b'"%b"' % plain.translate(SPACES)).encode("ascii")
            plain = plain.translate(URL_SAFE_TO_STANDARD, WHITE_SPACE).rstrip(b"=")
            data = pybase64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
        except ValueError:
            raise invalid_image("its base64 data is malformed") from None
    if not data:
        raise invalid_image("it has no payload")
    return data


def decode_data_url(url: str) -> bytes:
    """Decode a data: URL in a spelling that the body scanner does not recognise. RequestError 422."""
    header, _, payload = url.encode("utf-8", "replace").partition(b",")
    if not header.lower().rstrip().endswith(b";base64"):
        raise invalid_image("its data: URL has no base64")
    return decode_base64(payload)


class Sources:
    """Writes encoded bytes to regions of `allocator`, in threads of `pool`. Create it inside a running event loop."""

    def __init__(self, config: EngineConfig, bodies: ArenaView, allocator: RegionAllocator):
        self.bodies, self.allocator = bodies, allocator
        self.pool = ThreadPoolExecutor(config.media_pool_size, "media")
        self.fetcher = Fetcher(config)
        self.named: LRUCache[bytes, bytes] = LRUCache(NAMED_BYTES, len)  # encoded media by name; used only in the event loop

    async def run(self, job: Callable[[], T]) -> T:
        """Run a job that writes to no shared memory. It may continue after cancellation."""
        return await asyncio.wrap_future(self.pool.submit(job))

    async def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        await self.fetcher.close()


class File:
    """The encoded bytes of one image or video, from its payload, URL or name to their release. `look` runs in any thread as soon as the
    bytes are complete."""

    encoded: GrowingRegion | None = None
    digest: bytes  # hash of the encoded bytes, set by `load`

    def __init__(self, sources: Sources, ref: MediaRef, look: Callable[[GrowingRegion], object] = lambda encoded: None):
        self.ref = ref
        self.num_bytes = 0 if ref.payload is None else decoded_bytes(ref.payload) + ALIGNMENT  # at most, of its payload
        self._sources, self._look = sources, look
        self._job: Future[None] | None = None

    def start(self, at_once: bool = False) -> bool:
        """Start to decode the payload if there is memory for it now; `load` raises its errors. Return whether it has begun, or there is
        none. `at_once`: decode it here, since a change of threads takes longer."""
        payload = self.ref.payload
        if payload is None or self._job is not None:
            return True
        try:
            encoded = self.encoded = self._sources.allocator.allocate(decoded_bytes(payload))
        except (ArenaFull, ArenaTooSmall):
            return False
        text = self._sources.bodies.view(payload.offset, payload.length)
        target = np.frombuffer(encoded.unused, np.uint8)

        def unpack() -> None:
            data = decode_base64(text)
            encoded.used = len(data)
            np.copyto(target[: len(data)], np.frombuffer(data, np.uint8))  # without the interpreter lock, unlike a slice assignment
            self._look(encoded)

        work: Callable[[], object] = unpack
        if at_once:
            with contextlib.suppress(RequestError):  # the job raises it again
                unpack()
                work = bool
        self._begin(encoded, work)
        return True

    def _begin(self, encoded: GrowingRegion, work: Callable[[], object]) -> None:
        def run() -> None:
            work()
            self.digest = hashlib.sha256(encoded.view).digest()

        self._job = self._sources.pool.submit(run)

    async def load(self, max_bytes: int | None = None) -> GrowingRegion:
        """Return the bytes and set `digest`; keep bytes that the client has named. RequestError, ArenaFull or ArenaTooSmall."""
        if self._job is None:
            fetched = await self._fetch(max_bytes)
            self._begin(fetched, lambda: self._look(fetched))
        assert self._job is not None
        await asyncio.wrap_future(self._job)
        encoded = self.encoded
        assert encoded is not None
        encoded.trim()
        if self.ref.name is not None:
            data = await self._sources.run(lambda: bytes(encoded.view))
            with contextlib.suppress(ValueError):  # it is larger than the cache
                self._sources.named[self.ref.name] = data
        return encoded

    async def _fetch(self, max_bytes: int | None) -> GrowingRegion:
        """Return the bytes of a URL, or those that were sent under a name earlier."""
        sources, url = self._sources, self.ref.url or ""
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            encoded = self.encoded = sources.allocator.allocate(FIRST_DOWNLOAD_BYTES)
            await sources.fetcher.download(url, encoded.append, max_bytes)
            return encoded
        if self.ref.url is None:
            data = sources.named.get(self.ref.name or b"")
            if data is None:
                raise RequestError(400, "no media with this uuid is cached: send it with its URL", code="unknown_uuid")
        else:
            read_local = sources.fetcher.read_local
            data = await sources.run(lambda: decode_data_url(url) if scheme == "data" else read_local(url, max_bytes))
        encoded = self.encoded = sources.allocator.allocate(len(data))
        encoded.append(data)
        return encoded

    def free(self) -> None:
        if self.encoded is not None:
            self._sources.allocator.free(self.encoded)
        self.encoded = None

    async def release(self) -> None:
        """Free the bytes as soon as no thread uses them. The file may start again afterwards."""
        if self._job is not None and not self._job.cancel():
            await asyncio.gather(asyncio.wrap_future(self._job), return_exceptions=True)
        self.free()
        self._job = None  # its exception names this file


class Releasable(Protocol):
    async def release(self) -> None: ...


async def release_all(media: Iterable[Releasable]) -> None:
    await asyncio.gather(*(medium.release() for medium in media))


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run these concurrently and return their results. Raise the first error, after the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
