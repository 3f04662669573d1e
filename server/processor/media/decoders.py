"""Decoders of images and videos in guest processes."""

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from cachetools import LRUCache

from engine.wire.arena import Arena, GrowingRegion
from engine.wire.config import EngineConfig
from engine.wire.guests import GuestDied, GuestPool
from engine.wire.messages import ErrorInfo
from server.errors import RequestError, invalid_image
from server.processor.media.decoder import MEMORY_BYTES, Clip, Job, VideoJob, VideoLimits, invalid_video

NUM_REMEMBERED = 4096  # files whose headers are kept
LARGE_PIXELS = 1 << 23  # larger images leave one process to smaller ones
LARGE_AT_ONCE = 2  # each takes 8 bytes per pixel: the original and the RGB image, with Pillow's 4 bytes each
HEADER_CPU_S, DECODE_CPU_S, PIXELS_PER_CPU_S = 1, 2, 1 << 22  # ten times the values of usual files

Size = tuple[int, int]  # height, width
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Header:
    """Header of an image; the size is after `orientation` (EXIF)."""

    stays_encoded: bool
    height: int
    width: int
    orientation: int = 1

    @property
    def num_pixels(self) -> int:
        return self.height * self.width


class Decoders:
    """The guests of one arena. Create it inside a running event loop."""

    def __init__(self, config: EngineConfig, arena: Arena):
        self.num_decoded = 0  # files
        self.headers: LRUCache[bytes, Header] = LRUCache(NUM_REMEMBERED)  # by digest
        self.clips: LRUCache[bytes, Clip] = LRUCache(NUM_REMEMBERED)
        self._timeout, self._video_timeout = config.decode_timeout, config.video_timeout
        limits = VideoLimits(
            config.max_video_frame_pixels, config.max_video_file_frames, config.max_video_memory,
            threads=max(1, config.processing_pool_size // config.video_pool_size),
        )  # fmt: skip

        def pool_of(size: int, module: str, *arguments: str, memory: int) -> GuestPool:
            module = f"server.processor.media.{module}"
            return GuestPool(size, module, str(arena.fd), str(arena.size), *arguments, memory=memory, fds=(arena.fd,))

        num_guests = max(2, config.processing_pool_size)
        self._large = asyncio.Semaphore(min(LARGE_AT_ONCE, num_guests - 1))
        self._images = pool_of(num_guests, "decoder", memory=MEMORY_BYTES)
        self._videos = pool_of(config.video_pool_size, "video_file", msgspec.json.encode(limits).decode(), memory=limits.memory)
        self.pools = self._images, self._videos

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close()

    async def read_header(self, encoded: GrowingRegion) -> Header:
        """Read the header of a file other than a baseline JPEG. RequestError 422."""
        return Header(False, *await self._ask(Job((encoded.offset, encoded.used)), tuple[int, int, int], HEADER_CPU_S))

    async def decode(self, header: Header, encoded: GrowingRegion, offset: int, size: Size) -> None:
        """Write upright RGB of this size to the arena. RequestError."""
        self.num_decoded += 1
        job = Job((encoded.offset, encoded.used), offset, size, header.orientation)
        async with self._large if header.num_pixels > LARGE_PIXELS else contextlib.nullcontext():
            await self._ask(job, type(None), DECODE_CPU_S + header.num_pixels // PIXELS_PER_CPU_S)

    async def look(self, encoded: GrowingRegion) -> Clip:
        """Inspect a video file. RequestError 400, 413 or 422."""
        return await self._ask(VideoJob((encoded.offset, encoded.used)), Clip)

    async def read(self, encoded: GrowingRegion, wanted: list[int], offset: int, size: Size) -> None:
        """Write these frames of a video file to the arena. RequestError as in `look`."""
        self.num_decoded += 1
        await self._ask(VideoJob((encoded.offset, encoded.used), wanted, offset, size), type(None))

    async def _ask(self, job: Job | VideoJob, kind: type[T], cpu_seconds: int = 0) -> T:
        """Return the answer of an `arena_guest`. Raise its RequestError, or one for its end."""
        pool, timeout, invalid = self._images, self._timeout, invalid_image
        if isinstance(job, VideoJob):
            pool, timeout, invalid = self._videos, self._video_timeout, invalid_video
        try:
            answer = await pool.ask(msgspec.msgpack.encode(job), timeout, cpu_seconds)
        except TimeoutError:
            raise invalid(f"decoding it takes longer than {timeout} s") from None
        except GuestDied:
            raise invalid("the decoder crashed on it, or it takes more time or memory than a file of its size may") from None
        result, error = msgspec.msgpack.decode(answer, type=tuple[msgspec.Raw, ErrorInfo | None])
        if error is not None:
            raise RequestError.of(error)
        return msgspec.msgpack.decode(result, type=kind)
