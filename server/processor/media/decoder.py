"""Guest that decodes images: it reads encoded images in the processor's arena and writes their pixels there. Also jobs of all decoders."""

import functools
import logging
import warnings
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.wire.arena import ArenaView
from server.errors import RequestError
from server.processor.media.pixels import decode_rgb, read_header

invalid_video = functools.partial(RequestError, 422, code="invalid_video")
MEMORY_BYTES = 4 << 30  # memory limit of a guest; more fails the image

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Write pixels to `target`, upright by `orientation` (EXIF) and resized to `size` (height, width). Without `target`, only read the
    header."""

    encoded: tuple[int, int]  # offset, length
    target: int | None = None  # offset
    size: tuple[int, int] = (0, 0)
    orientation: int = 1


class VideoLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits: pixels per frame, frames per file, memory of a decoder in bytes, and its threads; as many threads resize its frames."""

    frame_pixels: int
    file_frames: int
    memory: int
    threads: int


class VideoJob(msgspec.Struct, frozen=True, array_like=True):
    """Write the frames `wanted` (ascending indices) to `target`, resized to `size` (height, width). If `wanted` is empty, only inspect the
    file."""

    encoded: tuple[int, int]  # offset, length
    wanted: list[int] = []
    target: int = 0  # offset
    size: tuple[int, int] = (0, 0)


class Clip(msgspec.Struct, frozen=True, array_like=True):
    """Number of frames in a file, their rate if the file states it, and the size of the first frame, upright."""

    num_frames: int
    fps: float | None
    height: int
    width: int


def prepare(arena_fd: str, arena_size: str) -> Callable[[bytes], bytes]:
    warnings.simplefilter("ignore")  # a defect of an image concerns only its client
    return arena_guest(arena_fd, arena_size, Job, answer)


def arena_guest(arena_fd: str, arena_size: str, kind: type[T], answer: Callable[[ArenaView, T], object]) -> Callable[[bytes], bytes]:
    """Return the function of a guest that answers jobs of this kind about data in the arena. Its answers are pairs
    of the result and the ErrorInfo of a RequestError."""
    logging.disable()
    arena = ArenaView(int(arena_fd), int(arena_size), writable=True)

    def run(job: bytes) -> bytes:
        try:
            return msgspec.msgpack.encode((answer(arena, msgspec.msgpack.decode(job, type=kind)), None))
        except RequestError as error:
            return msgspec.msgpack.encode((None, error.info))

    return run


def answer(arena: ArenaView, job: Job) -> tuple[int, ...] | None:
    """Return what `read_header` returns, or None after decoding."""
    data = arena.view(*job.encoded)
    if job.target is None:
        return read_header(data)
    decode_rgb(data, arena.view(job.target, 3 * job.size[0] * job.size[1]), job.size, job.orientation)
    return None
