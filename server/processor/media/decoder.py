"""Guest that decodes images. It reads encoded images in the processor's arena and writes their pixels there."""

import logging
import warnings
from collections.abc import Callable

import msgspec

from engine.wire.arena import ArenaView
from engine.wire.messages import ErrorInfo
from server.errors import RequestError
from server.processor.media.pixels import decode_rgb, read_header

MEMORY_BYTES = 4 << 30  # memory limit of a guest; more fails the image


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Write pixels to `target`, resized to `size`, which is in the image's stored orientation unless `is_upright`. Without `target`, only
    read the header."""

    encoded: tuple[int, int]  # offset, length
    target: tuple[int, int] | None = None
    size: tuple[int, int] = (0, 0)
    is_upright: bool = False


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """The image's size: as in the header, with its orientation, or upright if it was decoded; or an error."""

    height: int = 0
    width: int = 0
    orientation: int = 1
    error: ErrorInfo | None = None


def prepare(arena_fd: str, arena_size: str) -> Callable[[bytes], bytes]:
    warnings.simplefilter("ignore")  # a defect of an image concerns only its client
    logging.disable()
    arena = ArenaView(int(arena_fd), int(arena_size), writable=True)
    return lambda job: msgspec.msgpack.encode(answer(arena, msgspec.msgpack.decode(job, type=Job)))


def answer(arena: ArenaView, job: Job) -> Decoded:
    data = arena.view(*job.encoded)
    try:
        if job.target is None:
            return Decoded(*read_header(data))
        return Decoded(*decode_rgb(data, arena.view(*job.target), job.size, job.is_upright))
    except RequestError as error:
        return Decoded(error=error.info)
