"""Guest that decodes images. It reads encoded images in the processor's arena and writes their pixels there."""

import logging
import warnings
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine.wire.arena import ArenaView
from server.errors import RequestError
from server.processor.media.pixels import decode_rgb, read_header

MEMORY_BYTES = 4 << 30  # memory limit of a guest; more fails the image

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Write pixels to `target`, upright by `orientation` (EXIF) and resized to `size` (height, width). Without `target`, only read the
    header."""

    encoded: tuple[int, int]  # offset, length
    target: int | None = None  # offset
    size: tuple[int, int] = (0, 0)
    orientation: int = 1


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
