"""Allocation of regions in the processor's arena, for which requests may wait."""

import asyncio
from collections.abc import Callable

from engine.wire.arena import Arena, ArenaFull
from engine.wire.messages import PROCESSOR_ARENA
from engine.wire.messages import Region as WireRegion
from server.region import Region

TIMEOUT_S = 10.0  # a limit, as requests may wait for each other's regions


def wire(region: Region) -> WireRegion:
    """Return a reference to the region's used bytes for other processes."""
    return WireRegion(PROCESSOR_ARENA, region.offset, region.used)


class RegionAllocator:
    """Allocator of one arena. `is_shared()` returns whether other requests may release regions."""

    def __init__(self, arena: Arena, is_shared: Callable[[], bool]):
        self.arena = arena
        self._is_shared = is_shared
        self._released = asyncio.Event()

    def allocate(self, capacity: int) -> Region:
        """Return a new region. Raise ArenaFull or ArenaTooSmall."""
        return Region(self.arena, capacity)

    def free(self, region: Region) -> None:
        """Release a region that no thread uses; waiting requests try again."""
        region.free()
        self._released.set()
        self._released = asyncio.Event()

    async def allocate_when_free(self, capacity: int) -> Region:
        """Like `allocate`, but if the arena is full, wait up to TIMEOUT_S while other requests may release regions."""
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while True:
            released = self._released
            try:
                return self.allocate(capacity)
            except ArenaFull as lack:
                if not self._is_shared():
                    raise
                try:
                    async with asyncio.timeout_at(deadline):
                        await released.wait()
                except TimeoutError:
                    raise lack from None
