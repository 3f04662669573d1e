"""The processor's arena, for which requests may wait."""

import asyncio
from collections.abc import Callable

from engine.wire.arena import Arena, ArenaFull
from engine.wire.messages import PROCESSOR_ARENA
from engine.wire.messages import Region as WireRegion
from server.region import Region

TIMEOUT_S = 10.0  # requests that wait for each other's space must not deadlock


def wire(region: Region) -> WireRegion:
    """A region's used bytes, for other processes."""
    return WireRegion(PROCESSOR_ARENA, region.offset, region.used)


class Room:
    """Regions of one arena. `is_shared` tells whether other requests may release some."""

    def __init__(self, arena: Arena, is_shared: Callable[[], bool]):
        self.arena = arena
        self._is_shared = is_shared
        self._came = asyncio.Event()

    def take(self, capacity: int) -> Region:
        """Raises ArenaFull or ArenaTooSmall."""
        return Region(self.arena, capacity)

    def give_back(self, region: Region) -> None:
        """Release a region when no thread uses it. Waiting requests try again."""
        region.free()
        self._came.set()
        self._came = asyncio.Event()

    async def take_patiently(self, capacity: int) -> Region:
        """Waits while others may give some back; then as `take`."""
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while True:
            came = self._came
            await self.arena.prepare(capacity)
            try:
                return self.take(capacity)
            except ArenaFull as lack:
                if not self._is_shared():
                    raise
                try:
                    async with asyncio.timeout_at(deadline):
                        await came.wait()
                except TimeoutError:
                    raise lack from None
