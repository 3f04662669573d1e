"""A process that looks at images and decodes them: `python -m server.processor.decoder ARENA_FD SIZE`.

It reads encoded images out of the processor's arena and writes their pixels there.
"""

import logging
import os
import resource
import signal
import sys
import warnings

import msgspec

from engine.helper import answer_questions
from engine.launch.child import die_with_parent
from engine.wire.arena import ArenaView
from engine.wire.messages import ErrorInfo
from server.errors import RequestError
from server.processor.pixels import decode_rgb, read_header

NICENESS = 19  # streams go first
MEMORY_BYTES = 4 << 30  # beyond it a decoding fails


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Pixels go to `room`, made as large as `size`, which is turned as the image is unless it `is_upright`; without room, only the header
    is read."""

    encoded: tuple[int, int]  # offset, length
    cpu_seconds: int
    room: tuple[int, int] | None = None
    size: tuple[int, int] = (0, 0)
    is_upright: bool = False


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """The image's own size: as in the header, with its orientation, or upright if it was decoded. Or an error."""

    height: int = 0
    width: int = 0
    orientation: int = 1
    error: ErrorInfo | None = None


def main() -> None:
    die_with_parent(signal.SIGKILL)
    os.nice(NICENESS)
    warnings.simplefilter("ignore")  # what is wrong with an image is its client's business
    logging.disable()
    arena = ArenaView(int(sys.argv[1]), int(sys.argv[2]), writable=True)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer_questions(lambda question: msgspec.msgpack.encode(answer(arena, msgspec.msgpack.decode(question, type=Job))))


def answer(arena: ArenaView, job: Job) -> Decoded:
    """The kernel ends this process when the job takes longer than it may: no codec can be asked to stop."""
    signal.setitimer(signal.ITIMER_PROF, job.cpu_seconds)
    data = arena.view(*job.encoded)
    try:
        if job.room is None:
            return Decoded(*read_header(data))
        return Decoded(*decode_rgb(data, arena.view(*job.room), job.size, job.is_upright))
    except RequestError as error:
        return Decoded(error=error.info)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    main()
