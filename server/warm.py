"""Mapping of the arenas' resident pages in the background at startup.

The memory is reserved, but the first access to a page takes 1 to 9 us: 30 ms or more for the first request of 30 MB."""

import mmap
import threading
import time

from engine.wire.arena import RESIDENT_BYTES, ArenaView

STEP_BYTES = 1 << 18  # bytes touched without a pause: well below a millisecond
PAUSE_S = 0.001


def warm_up(*arenas: ArenaView) -> None:
    """Touch every resident page, lowest addresses first. Only reads, so it may run at any time."""
    threading.Thread(target=_touch, args=(arenas,), name="warm-up", daemon=True).start()


def _touch(arenas: tuple[ArenaView, ...]) -> None:
    for arena in arenas:
        for start in range(0, min(arena.size, RESIDENT_BYTES), STEP_BYTES):
            bytes(arena.buffer[start : start + STEP_BYTES : mmap.PAGESIZE])
            time.sleep(PAUSE_S)
