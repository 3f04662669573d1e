"""Decoders of images and videos in guest processes."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TypeVar

import msgspec
from cachetools import LRUCache

from engine.wire.arena import Arena
from engine.wire.config import EngineConfig
from engine.wire.guests import GuestDied, GuestKilled, GuestPool
from engine.wire.messages import ErrorInfo
from server.errors import RequestError, invalid_image, overloaded
from server.processor.media.decoder import MEMORY_BYTES, Clip, Job, VideoJob, VideoLimits, invalid_video
from server.processor.media.inspect import Header
from server.region import GrowingRegion

NUM_REMEMBERED = 4096  # files whose headers are kept
LARGE_PIXELS = 1 << 23  # larger images leave one process to smaller ones
LARGE_AT_ONCE = 2  # each takes 8 bytes per pixel: the original and the RGB image, with Pillow's 4 bytes each
HEADER_CPU_S, DECODE_CPU_S, PIXELS_PER_CPU_S = 1, 2, 1 << 22  # ten times the values of usual files

Size = tuple[int, int]  # height, width
T = TypeVar("T")


class Decoders:
    """The guests of one arena. Create it inside a running event loop."""

    def __init__(self, config: EngineConfig, arena: Arena):
        self.num_decoded = 0  # files
        self.headers: LRUCache[bytes, Header] = LRUCache(NUM_REMEMBERED)  # by digest
        self.clips: LRUCache[bytes, Clip] = LRUCache(NUM_REMEMBERED)
        self._large = asyncio.Semaphore(LARGE_AT_ONCE)
        self._timeout, self._video_timeout = config.decode_timeout, config.video_timeout
        self._has_pyav = find_spec("av") is not None
        size = config.video_pool_size
        limits = VideoLimits(
            config.max_video_frame_pixels, config.max_video_file_frames, config.max_video_memory,
            threads=max(1, config.processing_pool_size // size),
        )  # fmt: skip

        def pool_of(size: int, module: str, *arguments: str, memory: int) -> GuestPool:
            module = f"server.processor.media.{module}"
            return GuestPool(size, module, str(arena.fd), str(arena.size), *arguments, memory=memory, fds=(arena.fd,))

        self._images = pool_of(max(2, config.processing_pool_size), "decoder", memory=MEMORY_BYTES)
        self._videos = pool_of(size, "video_decoder", msgspec.json.encode(limits).decode(), memory=limits.memory)

    async def close(self) -> None:
        await self._images.close()
        await self._videos.close()

    async def read_header(self, encoded: GrowingRegion) -> Header:
        """Read the header of a file other than a baseline JPEG. RequestError 422."""
        return Header(False, *await self._ask(Job((encoded.offset, encoded.used)), tuple[int, int, int], HEADER_CPU_S))

    async def decode(self, header: Header, encoded: GrowingRegion, offset: int, size: Size) -> None:
        """Write upright RGB of this size to the arena. RequestError."""
        self.num_decoded += 1
        cpu_seconds, is_large = DECODE_CPU_S + header.num_pixels // PIXELS_PER_CPU_S, header.num_pixels > LARGE_PIXELS
        job = Job((encoded.offset, encoded.used), offset, size, header.orientation)
        async with self._large if is_large else contextlib.nullcontext():
            await self._ask(job, type(None), cpu_seconds, is_large)

    async def look(self, encoded: GrowingRegion) -> Clip:
        """Inspect a video file. RequestError 400, 413 or 422."""
        return await self._ask_video(VideoJob((encoded.offset, encoded.used)), Clip)

    async def read(self, encoded: GrowingRegion, wanted: list[int], offset: int, size: Size) -> None:
        """Write these frames of a video file to the arena. RequestError as in `look`."""
        self.num_decoded += 1
        await self._ask_video(VideoJob((encoded.offset, encoded.used), wanted, offset, size), type(None))

    async def _ask(self, job: Job, kind: type[T], cpu_seconds: int, is_large: bool = False) -> T:
        crashed = "decoding it exceeds the time or memory allowed for an image of its size"
        with guarded(self._timeout, invalid_image, crashed):
            return answer_of(await self._images.ask(msgspec.msgpack.encode(job), self._timeout, cpu_seconds, is_large=is_large), kind)

    async def _ask_video(self, job: VideoJob, kind: type[T]) -> T:
        if not self._has_pyav:
            words = "this server has no video decoder (PyAV is not installed): send frames"
            raise RequestError(400, words, code="no_video_decoder")
        with guarded(self._video_timeout, invalid_video, "the decoder crashed on this file"):
            return answer_of(await self._videos.ask(msgspec.msgpack.encode(job), self._video_timeout), kind)


@contextlib.contextmanager
def guarded(timeout: float, invalid: Callable[[str], RequestError], crashed: str) -> Iterator[None]:
    """Raise a RequestError for a timeout, or for a guest that died."""
    try:
        yield
    except TimeoutError:
        raise invalid(f"decoding it takes longer than {timeout} s") from None
    except GuestKilled:
        raise overloaded("the decoder was killed twice, probably because the machine is out of memory") from None
    except GuestDied:
        raise invalid(crashed) from None


def answer_of(answer: bytes, kind: type[T]) -> T:
    """Return the result in the answer of an `arena_guest`, or raise its RequestError."""
    result, error = msgspec.msgpack.decode(answer, type=tuple[msgspec.Raw, ErrorInfo | None])
    if error is not None:
        raise RequestError.of(error)
    return msgspec.msgpack.decode(result, type=kind)
