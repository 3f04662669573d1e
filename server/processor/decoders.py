"""Pillow runs in processes that can be ended. What decoding takes is known from the header, and budgeted before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import msgspec

from engine.arena import Arena
from engine.config import EngineConfig
from engine.helper import Helper, HelperDied
from server.errors import RequestError, invalid_image
from server.processor.decoder import Decoded, Job
from server.processor.inspect import Header
from server.region import Region

LARGE_PIXELS = 1 << 23  # from here on images share a budget, and leave a process to smaller ones
BYTES_PER_PIXEL = 8  # the image as it was, and as RGB, each of Pillow's 4 bytes a pixel
HEADER_CPU_S, DECODE_CPU_S, PIXELS_PER_CPU_S = 1, 2, 1 << 22  # ten times what usual files take

Size = tuple[int, int]  # height, width


class Budget:
    """An amount that is lent in the order of asking."""

    def __init__(self, total: int):
        self.total = total
        self._left = total
        self._turn = asyncio.Lock()
        self._came_back = asyncio.Event()

    @contextlib.asynccontextmanager
    async def lend(self, amount: int) -> AsyncIterator[None]:
        """At most `total`."""
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


class Decoders:
    """Make it inside a running event loop."""

    def __init__(self, config: EngineConfig, arena: Arena):
        self.budget = Budget(config.max_decode_bytes)
        self._timeout = config.decode_timeout
        self._arena = arena
        num_processes = max(2, config.processing_pool_size)
        self._idle = [Helper("server.processor.decoder", str(arena.fd), str(arena.size), fds=(arena.fd,)) for _ in range(num_processes)]
        self._all = list(self._idle)
        self._free, self._large = asyncio.Semaphore(num_processes), asyncio.Semaphore(num_processes - 1)

    async def close(self) -> None:
        for helper in self._all:
            await helper.close()

    def check(self, header: Header) -> None:
        """RequestError 413 for an image that could never be decoded."""
        if header.num_pixels > LARGE_PIXELS and BYTES_PER_PIXEL * header.num_pixels > self.budget.total:
            raise RequestError(413, "it takes more memory to decode than there may be", code="image_too_large")

    async def read_header(self, encoded: Region) -> Header:
        """Of a file that is no plain JPEG. RequestError 422."""
        return Header(False, *await self._ask(Job((encoded.offset, encoded.used), HEADER_CPU_S)))

    async def decode(self, header: Header, encoded: Region, pixels: Region, size: Size) -> Size:
        """RGB, as `decode_rgb` makes it."""
        cpu_seconds = DECODE_CPU_S + header.num_pixels // PIXELS_PER_CPU_S
        job = Job((encoded.offset, encoded.used), cpu_seconds, (pixels.offset, pixels.capacity), size)
        if header.num_pixels <= LARGE_PIXELS:
            return await self._ask(job)
        async with self.budget.lend(BYTES_PER_PIXEL * header.num_pixels), self._large:
            return await self._ask(job)

    async def _ask(self, job: Job) -> Size:
        async with self._free:
            helper = self._idle.pop()
            try:
                decoded = msgspec.msgpack.decode(await helper.ask(msgspec.msgpack.encode(job), self._timeout), type=Decoded)
            except TimeoutError:
                raise invalid_image(f"it takes longer than {self._timeout} s to decode") from None
            except HelperDied:
                words = "it cannot be decoded with the time and memory that an image of its size needs"
                raise invalid_image(words) from None
            finally:
                self._idle.append(helper)
        if decoded.error is not None:
            raise RequestError(decoded.error.status, decoded.error.message, code=decoded.error.code)
        return decoded.height, decoded.width
