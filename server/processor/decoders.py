"""Pillow and PyAV run in processes that can be ended. What the decoding of an image takes is known from the header, and budgeted before."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from importlib.util import find_spec

import msgspec

from engine.helper import Helper, HelperDied
from engine.launch.config import EngineConfig
from engine.wire.arena import Arena
from server.errors import RequestError, invalid_image, invalid_video, overloaded
from server.processor.decoder import Decoded, Job
from server.processor.inspect import Header
from server.processor.video_jobs import Clip, VideoAnswer, VideoJob, VideoLimits
from server.region import Region

LARGE_PIXELS = 1 << 23  # from here on images share a budget, and leave a process to smaller ones
BYTES_PER_PIXEL = 8  # the image as it was, and as RGB, each of Pillow's 4 bytes a pixel
NUM_ATTEMPTS = 2  # of a job whose process was killed
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


class HelperPool:
    """Equal helpers, for as many questions at once; others wait. Make it inside a running event loop."""

    def __init__(self, size: int, arena: Arena, module: str, *arguments: str):
        self._all = [Helper(module, str(arena.fd), str(arena.size), *arguments, fds=(arena.fd,)) for _ in range(size)]
        self._idle = list(self._all)
        self._free = asyncio.Semaphore(size)

    async def ask(self, question: bytes, timeout: float) -> bytes:
        """Return the answer of an idle helper; a killed one is asked again once. Errors as `Helper.ask`, and RequestError 503 if the second
        one was killed, too."""
        async with self._free:
            helper = self._idle.pop()
            try:
                for _ in range(NUM_ATTEMPTS):
                    try:
                        return await helper.ask(question, timeout)
                    except HelperDied as death:
                        if not death.is_killed:
                            raise
                raise overloaded(f"its decoder was killed {NUM_ATTEMPTS} times, probably because the machine is out of memory")
            finally:
                self._idle.append(helper)

    async def close(self) -> None:
        for helper in self._all:
            await helper.close()


class Decoders:
    """Make it inside a running event loop."""

    def __init__(self, config: EngineConfig, arena: Arena):
        self.budget = Budget(config.max_decode_bytes)
        self._timeout = config.decode_timeout
        num_processes = max(2, config.processing_pool_size)
        self._pool = HelperPool(num_processes, arena, "server.processor.decoder")
        self._large = asyncio.Semaphore(num_processes - 1)

    async def close(self) -> None:
        await self._pool.close()

    def check(self, header: Header) -> None:
        """RequestError 413 for an image that could never be decoded."""
        if header.num_pixels > LARGE_PIXELS and BYTES_PER_PIXEL * header.num_pixels > self.budget.total:
            raise RequestError(413, "it takes more memory to decode than there may be", code="image_too_large")

    async def read_header(self, encoded: Region) -> Header:
        """Of a file that is no plain JPEG. RequestError 422."""
        found = await self._ask(Job((encoded.offset, encoded.used), HEADER_CPU_S))
        return Header(False, found.height, found.width, found.orientation)

    async def decode(self, header: Header, encoded: Region, place: tuple[int, int], size: Size, is_upright: bool = False) -> Size:
        """RGB at `place` (offset, length), as `decode_rgb` makes it."""
        cpu_seconds = DECODE_CPU_S + header.num_pixels // PIXELS_PER_CPU_S
        job = Job((encoded.offset, encoded.used), cpu_seconds, place, size, is_upright)
        if header.num_pixels <= LARGE_PIXELS:
            decoded = await self._ask(job)
        else:
            async with self.budget.lend(BYTES_PER_PIXEL * header.num_pixels), self._large:
                decoded = await self._ask(job)
        return decoded.height, decoded.width

    async def _ask(self, job: Job) -> Decoded:
        try:
            decoded = msgspec.msgpack.decode(await self._pool.ask(msgspec.msgpack.encode(job), self._timeout), type=Decoded)
        except TimeoutError:
            raise invalid_image(f"it takes longer than {self._timeout} s to decode") from None
        except HelperDied:
            raise invalid_image("it cannot be decoded with the time and memory that an image of its size needs") from None
        if decoded.error is not None:
            raise RequestError(decoded.error.status, decoded.error.message, code=decoded.error.code)
        return decoded


class VideoDecoders:
    """Make it inside a running event loop."""

    def __init__(self, config: EngineConfig, arena: Arena):
        size = config.video_pool_size
        threads = max(1, config.processing_pool_size // size)
        limits = VideoLimits(config.max_video_frame_pixels, config.max_video_file_frames, config.max_video_memory, threads)
        self._timeout = config.video_timeout
        self._pool = HelperPool(size, arena, "server.processor.video_decoder", msgspec.json.encode(limits).decode())
        self._is_installed = find_spec("av") is not None

    async def close(self) -> None:
        await self._pool.close()

    async def look(self, encoded: Region) -> Clip:
        """RequestError 400, 413 or 422."""
        clip = (await self._ask(VideoJob((encoded.offset, encoded.used)))).clip
        assert clip is not None
        return clip

    async def read(self, encoded: Region, wanted: list[int], pixels: Region, size: Size, parameters: bytes) -> list[bytes]:
        """Writes these frames to `pixels`; the hashes of their pairs. RequestError as `look`."""
        room = pixels.offset, pixels.capacity
        return (await self._ask(VideoJob((encoded.offset, encoded.used), wanted, room, size, parameters))).hashes

    async def _ask(self, job: VideoJob) -> VideoAnswer:
        if not self._is_installed:
            raise RequestError(
                400, "this server was installed without a decoder of videos (PyAV); frames may be sent", code="no_video_decoder"
            )
        try:
            answer = msgspec.msgpack.decode(await self._pool.ask(msgspec.msgpack.encode(job), self._timeout), type=VideoAnswer)
        except TimeoutError:
            raise invalid_video(f"it takes longer than {self._timeout} s to decode") from None
        except HelperDied:
            raise invalid_video("it breaks its decoder") from None
        if answer.error is not None:
            raise RequestError(answer.error.status, answer.error.message, code=answer.error.code)
        return answer
