"""Guest that reads video files in the processor's arena and writes frames there."""

from collections.abc import Callable

import msgspec

from engine.wire.arena import ArenaView
from server.processor.media.decoder import Clip, VideoJob, VideoLimits, arena_guest, invalid_video
from server.processor.media.video_file import look, read_frames


def prepare(arena_fd: str, arena_size: str, limits: str) -> Callable[[bytes], bytes]:
    """Return the guest's function. `limits`: JSON of VideoLimits."""
    read_limits = msgspec.json.decode(limits, type=VideoLimits)
    return arena_guest(arena_fd, arena_size, VideoJob, lambda arena, job: answer(arena, read_limits, job))


def answer(arena: ArenaView, limits: VideoLimits, job: VideoJob) -> Clip | None:
    """Return the result of an inspection, or None after decoding. RequestError."""
    data, size = arena.view(*job.encoded), 3 * job.size[0] * job.size[1]
    try:
        if not job.wanted:
            return look(data, limits)
        read_frames(data, limits, job.wanted, job.size, arena.view(job.target, size * len(job.wanted)))
    except MemoryError:
        raise invalid_video(f"decoding it needs more than {limits.memory >> 20} MiB") from None
    return None
