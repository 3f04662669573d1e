"""Allocation in the processor's arena: at most half of it for inputs and half for decoded pixels, for which requests wait in order."""

import asyncio
from collections.abc import Callable

from engine.wire.arena import Arena, ArenaFull, ArenaTooSmall
from engine.wire.messages import PROCESSOR_ARENA
from engine.wire.messages import Region as WireRegion
from server.region import Region


def wire(region: Region) -> WireRegion:
    """Return a reference to the region's used bytes for other processes."""
    return WireRegion(PROCESSOR_ARENA, region.offset, region.used)


class RegionAllocator:
    """Regions of one arena. Requests that wait for inputs hold none, and those that wait for pixels no pixels, so that every wait ends."""

    def __init__(self, arena: Arena):
        self.arena = arena
        self.most = arena.size // 2  # bytes of inputs, and of pixels
        self.is_short = False  # a request waits for inputs
        self._pixels: dict[int, int] = {}  # offset -> bytes
        self._turn = asyncio.Lock()
        self._released = asyncio.Event()

    def allocate(self, capacity: int) -> Region:
        """Return a new region for inputs. Raise ArenaFull or ArenaTooSmall."""
        self._check_inputs(capacity)
        return Region(self.arena, capacity)

    def append(self, region: Region, data: bytes) -> None:
        """Append inputs. Raise ArenaFull or ArenaTooSmall."""
        self._check_inputs(len(data) if region.used + len(data) > region.capacity else 0)
        region.append(data)

    async def allocate_when_free(self, capacity: int) -> Region:
        """Like `allocate`, but wait for memory."""
        self.is_short = True
        try:
            return await self._when_free(lambda: self.allocate(capacity))
        finally:
            self.is_short = False

    async def reserve(self, capacity: int) -> Region:
        """Return a region for all pixels of a request, after earlier calls got theirs. Raise ArenaTooSmall."""
        if capacity > self.most:
            raise ArenaTooSmall
        async with self._turn:
            return await self._when_free(lambda: self._allocate_pixels(capacity))

    def free(self, region: Region) -> None:
        """Release a region that no thread or process uses."""
        self._pixels.pop(region.offset, None)
        region.free()
        self._released.set()

    def _allocate_pixels(self, capacity: int) -> Region:
        if sum(self._pixels.values()) + capacity > self.most:
            raise ArenaFull
        region = Region(self.arena, capacity)
        self._pixels[region.offset] = region.used = capacity
        return region

    def _check_inputs(self, num_new: int) -> None:
        if num_new > self.most:
            raise ArenaTooSmall
        if self.arena.size - self.arena.num_free - sum(self._pixels.values()) + num_new > self.most:
            raise ArenaFull

    async def _when_free(self, attempt: Callable[[], Region]) -> Region:
        while True:
            try:
                return attempt()
            except ArenaFull:
                self._released.clear()
                await self._released.wait()
