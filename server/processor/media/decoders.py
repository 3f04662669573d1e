"""Decoders of images and videos in guest processes, and their jobs."""

import asyncio
import contextlib
import functools
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from cachetools import LRUCache

from engine.wire.arena import Arena, GrowingRegion
from engine.wire.config import EngineConfig
from engine.wire.guests import GuestDied, GuestPool
from engine.wire.messages import ErrorInfo
from server.errors import RequestError, invalid_image

NUM_REMEMBERED = 4096  # files whose headers are kept
LARGE_PIXELS = 1 << 23  # a large image takes 8 bytes per pixel: the original and the RGB image, with Pillow's 4 bytes each

Size = tuple[int, int]  # height, width
T = TypeVar("T")
invalid_video = functools.partial(RequestError, 422, code="invalid_video")


class Job(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write pixels to `target`, upright by `orientation` (EXIF) and resized to `size` (height, width). Without `target`, only read the
    header."""

    encoded: tuple[int, int]  # offset, length
    target: int | None = None  # offset
    size: tuple[int, int] = (0, 0)
    orientation: int = 1


class VideoJob(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Write the frames `wanted` (ascending indices) to `target`, resized to `size` (height, width). If `wanted` is empty, only inspect the
    file."""

    encoded: tuple[int, int]  # offset, length
    wanted: list[int] = []
    target: int = 0  # offset
    size: tuple[int, int] = (0, 0)


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """Limits: memory of a guest in bytes; pixels per frame of a video, frames per file, and threads that decode and resize them."""

    memory: int
    frame_pixels: int
    file_frames: int
    threads: int


class Clip(msgspec.Struct, frozen=True, array_like=True):
    """Number of frames in a file, their rate if the file states it, and the size of the first frame, upright."""

    num_frames: int
    fps: float | None
    height: int
    width: int


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
        self._timeout = config.decode_timeout
        limits = Limits(
            config.max_decoder_memory, config.max_video_frame_pixels, config.max_video_file_frames,
            threads=max(1, config.processing_pool_size // config.large_at_once),
        )  # fmt: skip
        arguments = str(arena.fd), str(arena.size), msgspec.json.encode(limits).decode()
        module, num_guests = "server.processor.media.decoder", max(2, config.processing_pool_size)
        self.pool = GuestPool(num_guests, module, *arguments, memory=limits.memory, fds=(arena.fd,))
        self._large = asyncio.Semaphore(config.large_at_once)  # leaves one guest to other images

    async def read_header(self, encoded: GrowingRegion) -> Header:
        """Read the header of a file other than a baseline JPEG. RequestError 422."""
        return Header(False, *await self._ask(Job((encoded.offset, encoded.used)), tuple[int, int, int]))

    async def decode(self, header: Header, encoded: GrowingRegion, offset: int, size: Size) -> None:
        """Write upright RGB of this size to the arena. RequestError."""
        self.num_decoded += 1
        job = Job((encoded.offset, encoded.used), offset, size, header.orientation)
        await self._ask(job, type(None), is_large=header.num_pixels > LARGE_PIXELS)

    async def look(self, encoded: GrowingRegion) -> Clip:
        """Inspect a video file. RequestError 400, 413 or 422."""
        return await self._ask(VideoJob((encoded.offset, encoded.used)), Clip, is_large=True)

    async def read(self, encoded: GrowingRegion, wanted: list[int], offset: int, size: Size) -> None:
        """Write these frames of a video file to the arena. RequestError as in `look`."""
        self.num_decoded += 1
        await self._ask(VideoJob((encoded.offset, encoded.used), wanted, offset, size), type(None), is_large=True)

    async def _ask(self, job: Job | VideoJob, kind: type[T], is_large: bool = False) -> T:
        """Return a guest's answer. Raise its RequestError, or one for its end."""
        invalid = invalid_video if isinstance(job, VideoJob) else invalid_image
        try:
            async with self._large if is_large else contextlib.nullcontext():
                answer = await self.pool.ask(msgspec.msgpack.encode(job), self._timeout)
        except TimeoutError:
            raise invalid(f"decoding it takes longer than {self._timeout} s") from None
        except GuestDied:
            raise invalid("the decoder crashed on it, or it takes more memory than a file may") from None
        result, error = msgspec.msgpack.decode(answer, type=tuple[msgspec.Raw, ErrorInfo | None])
        if error is not None:
            raise RequestError.of(error)
        return msgspec.msgpack.decode(result, type=kind)
