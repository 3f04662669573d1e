"""Where pixels are made: small images in threads, large ones in a few processes that can be ended. Used by `server/processor/image.py`.

A file of a kilobyte may claim to be gigabytes of pixels. What it takes is known from its header, and is budgeted before it is decoded.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

import msgspec

from engine.arena import Arena
from engine.config import EngineConfig, num_cpus
from engine.helper import Helper, HelperDied
from server.errors import RequestError
from server.processor.decoder import Decoded, Job
from server.processor.inspect import Header
from server.processor.pixels import DecodedSize, decode_rgb
from server.processor.threads import run
from server.region import Region

LARGE_PIXELS = 1 << 23  # from here on an image is a matter for a process: a thread would hold the interpreter for tens of milliseconds
BYTES_PER_PIXEL = 8  # at the worst moment: the image as it was, and as RGB, each of Pillow's 4 bytes a pixel
MAX_PROCESSES = 4


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
        self._threads = ThreadPoolExecutor(config.processing_pool_size, "pixels")
        num_processes = max(1, min(MAX_PROCESSES, num_cpus() // 2))
        self._idle = [Helper("server.processor.decoder", str(arena.fd), str(arena.size), fds=(arena.fd,)) for _ in range(num_processes)]
        self._all = list(self._idle)
        self._free = asyncio.Semaphore(num_processes)

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        for helper in self._all:
            await helper.close()

    def check(self, header: Header) -> None:
        """RequestError 413 for an image that could never be decoded."""
        if header.num_pixels > LARGE_PIXELS and BYTES_PER_PIXEL * header.num_pixels > self.budget.total:
            raise RequestError(413, "it takes more memory to decode than there may be", code="image_too_large")

    async def decode(self, header: Header, encoded: Region, pixels: Region, size: tuple[int, int]) -> DecodedSize:
        """RGB of an image, made as large as `size`, which may be turned as the image is. Its own size, upright. RequestError 422."""
        if header.num_pixels <= LARGE_PIXELS:
            room = pixels.room
            return await run(self._threads, lambda: decode_rgb(encoded.view, room, size))
        async with self.budget.lend(BYTES_PER_PIXEL * header.num_pixels), self._free:
            helper = self._idle.pop()
            try:
                return await self._ask(helper, Job((encoded.offset, encoded.used), (pixels.offset, pixels.capacity), size))
            finally:
                self._idle.append(helper)

    async def _ask(self, helper: Helper, job: Job) -> DecodedSize:
        try:
            decoded = msgspec.msgpack.decode(await helper.ask(msgspec.msgpack.encode(job), self._timeout), type=Decoded)
        except TimeoutError:
            raise RequestError(422, f"it takes longer than {self._timeout} s to decode", code="invalid_image") from None
        except HelperDied:
            raise RequestError(422, "it cannot be decoded", code="invalid_image") from None
        if decoded.error is not None:
            raise RequestError(decoded.error.status, decoded.error.message, code=decoded.error.code)
        return DecodedSize(decoded.height, decoded.width)
