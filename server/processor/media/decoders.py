"""Image decoders in guest processes. An image's memory is computed from its header and reserved before it is decoded."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import msgspec
from cachetools import LRUCache

from engine.wire.arena import Arena
from engine.wire.config import EngineConfig
from engine.wire.guests import GuestDied, GuestKilled, GuestPool
from engine.wire.messages import ErrorInfo
from server.errors import RequestError, invalid_image, overloaded
from server.processor.media.decoder import MEMORY_BYTES, Job
from server.processor.media.inspect import Header
from server.region import Region

NUM_REMEMBERED = 4096  # decoded files; an evicted one is decoded again
NUM_REMEMBERED_PAIRS = 1 << 15
LARGE_PIXELS = 1 << 23  # larger images share a memory budget and leave one process to smaller ones
BYTES_PER_PIXEL = 8  # the original and the RGB image, with Pillow's 4 bytes per pixel each
HEADER_CPU_S, DECODE_CPU_S, PIXELS_PER_CPU_S = 1, 2, 1 << 22  # ten times the values of usual files

KILLED = "the decoder was killed twice, probably because the machine is out of memory"

Size = tuple[int, int]  # height, width
T = TypeVar("T")


class Budget:
    """An amount that is lent in the order of the requests."""

    def __init__(self, total: int):
        self.total = total
        self._left = total
        self._turn = asyncio.Lock()
        self._came_back = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lend(self, amount: int) -> AsyncIterator[None]:
        """Lend this amount, at most `total`, within the context."""
        async with self._turn:
            while self._left < amount:
                self._came_back.clear()
                await self._came_back.wait()
            self._left -= amount
        try:
            yield
        finally:
            self._left += amount
            self._came_back.set()


def pool_of(size: int, arena: Arena, module: str, *arguments: str, memory: int) -> GuestPool:
    return GuestPool(size, module, str(arena.fd), str(arena.size), *arguments, memory=memory, fds=(arena.fd,))


class Decoders:
    """Pool of image decoders. Create it inside a running event loop."""

    def __init__(self, config: EngineConfig, arena: Arena):
        self.num_decoded = 0
        self.known: LRUCache[bytes, tuple[Header, Size]] = LRUCache(NUM_REMEMBERED)  # decoded files by digest: header, and size upright
        self.known_pairs: LRUCache[tuple[bytes, bytes, Size], bytes] = LRUCache(NUM_REMEMBERED_PAIRS)  # hashes, by frames and their size
        self.budget = Budget(config.max_decode_bytes)
        self._timeout = config.decode_timeout
        size = max(2, config.processing_pool_size)
        self._pool = pool_of(size, arena, "server.processor.media.decoder", memory=MEMORY_BYTES)

    async def close(self) -> None:
        await self._pool.close()

    async def read_header(self, encoded: Region) -> Header:
        """Read the header of a file other than a baseline JPEG. RequestError 422."""
        return Header(False, *await self._ask(Job((encoded.offset, encoded.used)), tuple[int, int, int], HEADER_CPU_S))

    async def decode(self, header: Header, encoded: Region, place: tuple[int, int], size: Size, is_upright: bool = False) -> Size:
        """Write RGB to `place` (offset, length), see `decode_rgb`. Return the image's size. RequestError as in `answer_of`,
        or 413 for an image that exceeds the memory budget on its own."""
        cpu_seconds = DECODE_CPU_S + header.num_pixels // PIXELS_PER_CPU_S
        job = Job((encoded.offset, encoded.used), place, size, is_upright)
        num_bytes = BYTES_PER_PIXEL * header.num_pixels
        if header.num_pixels <= LARGE_PIXELS:
            return await self._ask(job, tuple[int, int], cpu_seconds)
        if num_bytes > self.budget.total:
            raise RequestError(413, "decoding it needs more memory than --max-decode-bytes allows", code="image_too_large")
        async with self.budget.lend(num_bytes):
            return await self._ask(job, tuple[int, int], cpu_seconds, is_large=True)

    async def _ask(self, job: Job, kind: type[T], cpu_seconds: int, is_large: bool = False) -> T:
        work = self._pool.ask(msgspec.msgpack.encode(job), self._timeout, cpu_seconds, is_large=is_large)
        words = "decoding it exceeds the time or memory allowed for an image of its size"
        return await answer_of(work, kind, self._timeout, invalid_image, words)


async def answer_of(work: Awaitable[bytes], kind: type[T], timeout: float, invalid: Callable[[str], RequestError], crashed: str) -> T:
    """Return the answer of an `arena_guest`. RequestError for its error, a timeout, or a guest that died."""
    try:
        result, error = msgspec.msgpack.decode(await work, type=tuple[msgspec.Raw, ErrorInfo | None])
    except TimeoutError:
        raise invalid(f"decoding it takes longer than {timeout} s") from None
    except GuestKilled:
        raise overloaded(KILLED) from None
    except GuestDied:
        raise invalid(crashed) from None
    if error is not None:
        raise RequestError.of(error)
    return msgspec.msgpack.decode(result, type=kind)
