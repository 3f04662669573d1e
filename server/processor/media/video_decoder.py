"""Guest that reads video files in the processor's arena and writes frames there."""

from collections.abc import Callable

import msgspec

from engine.wire.arena import ArenaView
from server.processor.media.decoder import arena_guest
from server.processor.media.pixels import pair_hash
from server.processor.media.video_file import Rgb, look, read_pairs
from server.processor.media.video_jobs import Clip, VideoJob, VideoLimits, invalid_video
from server.processor.media.video_plan import PAIR


def prepare(arena_fd: str, arena_size: str, limits: str) -> Callable[[bytes], bytes]:
    """Return the guest's function. `limits`: JSON of VideoLimits."""
    read_limits = msgspec.json.decode(limits, type=VideoLimits)
    return arena_guest(arena_fd, arena_size, VideoJob, lambda arena, job: answer(arena, read_limits, job))


def answer(arena: ArenaView, limits: VideoLimits, job: VideoJob) -> Clip | list[bytes]:
    """Return the result of an inspection, or the hashes of the wanted pairs. RequestError."""
    try:
        return _read(arena, limits, job) if job.wanted else look(arena.view(*job.encoded), limits)
    except MemoryError:
        raise invalid_video(f"decoding it needs more than {limits.memory >> 20} MiB") from None


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
