"""A process that reads video files: `python -m server.processor.video_decoder ARENA_FD SIZE LIMITS`.

It reads them out of the processor's arena and writes frames there. Limits are the JSON of VideoLimits.
"""

import logging
import os
import resource
import signal
import sys

import msgspec

from engine.helper import answer_questions
from engine.launch.child import die_with_parent
from engine.wire.arena import ArenaView
from server.errors import RequestError, invalid_video
from server.processor.inspect import PAIR
from server.processor.pixels import pair_hash
from server.processor.video_file import Rgb, look, read_pairs
from server.processor.video_jobs import VideoAnswer, VideoJob, VideoLimits

NICENESS = 19  # streams go first


def main() -> None:
    die_with_parent(signal.SIGKILL)
    os.nice(NICENESS)
    logging.disable()
    arena = ArenaView(int(sys.argv[1]), int(sys.argv[2]), writable=True)
    limits = msgspec.json.decode(sys.argv[3], type=VideoLimits)
    resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, limits.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer_questions(lambda question: msgspec.msgpack.encode(answer(arena, limits, msgspec.msgpack.decode(question, type=VideoJob))))


def answer(arena: ArenaView, limits: VideoLimits, job: VideoJob) -> VideoAnswer:
    data = arena.view(*job.encoded)
    try:
        return VideoAnswer(hashes=_read(arena, limits, job)) if job.wanted else VideoAnswer(look(data, limits))
    except RequestError as error:
        return VideoAnswer(error=error.info)
    except MemoryError:
        return VideoAnswer(error=invalid_video(f"its decoding takes more than {limits.memory >> 20} MiB of memory").info)


def _read(arena: ArenaView, limits: VideoLimits, job: VideoJob) -> list[bytes]:
    room = arena.view(*job.room)
    frame_bytes = 3 * job.size[0] * job.size[1]
    hashes = [b""] * (len(job.wanted) // PAIR)

    def write(i: int, frames: list[Rgb]) -> None:
        pair = room[PAIR * i * frame_bytes : PAIR * (i + 1) * frame_bytes]
        for half, frame in enumerate(frames):
            pair[half * frame_bytes : (half + 1) * frame_bytes] = frame.reshape(-1).data
        hashes[i] = pair_hash(job.parameters, job.size, pair)

    read_pairs(arena.view(*job.encoded), limits, job.wanted, job.size, write)
    return hashes


if __name__ == "__main__":
    main()
