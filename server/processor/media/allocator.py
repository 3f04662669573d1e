"""Allocation in the processor's arena: one half is for inputs, the other for decoded pixels, for which requests wait in order."""

import asyncio

from engine.wire.arena import ALIGNMENT, Arena, ArenaFull
from engine.wire.messages import PROCESSOR_ARENA, Region
from server.region import GrowingRegion


def wire(region: GrowingRegion) -> Region:
    """Return a reference to the region's used bytes for other processes."""
    return Region(PROCESSOR_ARENA, region.offset, region.used)


class RegionAllocator:
    """Regions of a shared memory. Requests that wait for inputs hold none, and those that wait for pixels no pixels, so that every wait
    ends."""

    def __init__(self, fd: int, size: int):
        half = size // 2 // ALIGNMENT * ALIGNMENT
        self.inputs, self.pixels = Arena(fd, half), Arena(fd, size, start=half)
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    def allocate(self, capacity: int) -> GrowingRegion:
        """Return a new region for inputs. Raise ArenaFull or ArenaTooSmall."""
        return GrowingRegion(self.inputs, capacity)

    async def reserve(self, capacity: int) -> GrowingRegion:
        """Return a region for all pixels of a request, after earlier calls got theirs. Raise ArenaTooSmall."""
        async with self._turn:
            while True:
                try:
                    return GrowingRegion(self.pixels, capacity)
                except ArenaFull:
                    await self.wait()

    async def wait(self) -> None:
        """Wait until a region is released."""
        self._released.clear()
        await self._released.wait()

    def free(self, region: GrowingRegion) -> None:
        """Release a region that no thread or process uses."""
        region.free()
        self._released.set()

    def is_empty(self) -> bool:
        return self.inputs.is_empty() and self.pixels.is_empty()
