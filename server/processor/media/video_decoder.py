"""Guest that reads video files in the processor's arena and writes frames there."""

import logging
from collections.abc import Callable

import msgspec

from engine.wire.arena import ArenaView
from server.errors import RequestError
from server.processor.media.pixels import pair_hash
from server.processor.media.video_file import Rgb, look, read_pairs
from server.processor.media.video_jobs import VideoAnswer, VideoJob, VideoLimits, invalid_video
from server.processor.media.video_plan import PAIR


def prepare(arena_fd: str, arena_size: str, limits: str) -> Callable[[bytes], bytes]:
    """Return the guest's function from a VideoJob to a VideoAnswer, both encoded. `limits`: JSON of VideoLimits."""
    logging.disable()
    arena = ArenaView(int(arena_fd), int(arena_size), writable=True)
    read = msgspec.json.decode(limits, type=VideoLimits)
    return lambda job: msgspec.msgpack.encode(answer(arena, read, msgspec.msgpack.decode(job, type=VideoJob)))


def answer(arena: ArenaView, limits: VideoLimits, job: VideoJob) -> VideoAnswer:
    data = arena.view(*job.encoded)
    try:
        return VideoAnswer(hashes=_read(arena, limits, job)) if job.wanted else VideoAnswer(look(data, limits))
    except RequestError as error:
        return VideoAnswer(error=error.info)
    except MemoryError:
        return VideoAnswer(error=invalid_video(f"decoding it needs more than {limits.memory >> 20} MiB (--max-video-memory)").info)


def _read(arena: ArenaView, limits: VideoLimits, job: VideoJob) -> list[bytes]:
    target = arena.view(*job.target)
    frame_bytes = 3 * job.size[0] * job.size[1]
    hashes = [b""] * (len(job.wanted) // PAIR)

    def write(i: int, frames: list[Rgb]) -> None:
        pair = target[PAIR * i * frame_bytes : PAIR * (i + 1) * frame_bytes]
        for half, frame in enumerate(frames):
            pair[half * frame_bytes : (half + 1) * frame_bytes] = frame.reshape(-1).data
        hashes[i] = pair_hash(job.parameters, job.size, pair)

    read_pairs(arena.view(*job.encoded), limits, job.wanted, job.size, write)
    return hashes
