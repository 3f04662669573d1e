"""A decoder process: `python -m server.processor.decoder ARENA_FD SIZE`. Started, timed and ended by `server/processor/decoders.py`.

It reads encoded images out of the processor's arena and writes their pixels there. Nothing that it does keeps the processor waiting.
"""

import os
import resource
import signal
import sys

import msgspec

from engine.arena import ArenaView
from engine.helper import answer_questions
from engine.ipc import die_with_parent
from engine.messages import ErrorInfo
from server.errors import RequestError
from server.processor.pixels import DecodedSize, decode_rgb

NICENESS = 19  # streams go first
MEMORY_BYTES = 4 << 30  # beyond it a decoding fails


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Where the encoded bytes are, where the pixels go, and how large the image is to be made."""

    encoded: tuple[int, int]  # offset, length
    room: tuple[int, int]
    size: tuple[int, int]


class Decoded(msgspec.Struct, frozen=True, array_like=True):
    """The image's own size, upright; or why there is none."""

    height: int = 0
    width: int = 0
    error: ErrorInfo | None = None


def main() -> None:
    """Entry point."""
    die_with_parent(signal.SIGKILL)
    os.nice(NICENESS)
    arena = ArenaView(int(sys.argv[1]), int(sys.argv[2]), writable=True)
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
    answer_questions(lambda question: msgspec.msgpack.encode(decode(arena, msgspec.msgpack.decode(question, type=Job))))


def decode(arena: ArenaView, job: Job) -> Decoded:
    try:
        size: DecodedSize = decode_rgb(arena.view(*job.encoded), arena.view(*job.room), job.size)
    except RequestError as error:
        return Decoded(error=error.info)
    return Decoded(size.height, size.width)


if __name__ == "__main__":
    main()
