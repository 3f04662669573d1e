"""Regions of arenas that are filled piece by piece and may grow or move meanwhile, and the processor's arena.

One half of it is for inputs, the other for decoded pixels, for which requests wait in order."""

import asyncio

from engine.wire.arena import ALIGNMENT, Arena, ArenaFull
from engine.wire.messages import PROCESSOR_ARENA, Region

MIN_GROWTH = 1 << 20


class GrowingRegion:
    """One allocation and the position of its writer; its offset is final once it is complete. Raise ArenaFull or ArenaTooSmall."""

    def __init__(self, arena: Arena, capacity: int):
        self._arena = arena
        self.offset = arena.alloc(capacity)
        self.capacity = capacity
        self.used = 0

    @property
    def unused(self) -> memoryview:
        """Return the memory after the used bytes. Valid until the next `reserve`."""
        return self._arena.view(self.offset + self.used, self.capacity - self.used)

    @property
    def view(self) -> memoryview:
        """Return the used bytes. Valid until the next `reserve`."""
        return self._arena.view(self.offset, self.used)

    def wire(self) -> Region:
        """Return a reference to the used bytes, in the processor's arena, for other processes."""
        return Region(PROCESSOR_ARENA, self.offset, self.used)

    def reserve(self, num_bytes: int) -> None:
        """Ensure capacity for so many further bytes. Capacity doubles, so that many small pieces cost no more than one large one."""
        need = self.used + num_bytes
        if need > self.capacity:
            wanted = max(need, min(2 * self.capacity, self._arena.size), self.capacity + MIN_GROWTH)
            capacity = min(wanted, self._arena.size) if need <= self._arena.size else need
            self.offset, self.capacity = self._arena.grow(self.offset, self.used, capacity), capacity

    def append(self, data: bytes) -> None:
        self.reserve(len(data))
        self.unused[: len(data)] = data
        self.used += len(data)

    def trim(self) -> None:
        self._arena.shrink(self.offset, self.used)
        self.capacity = self.used

    def free(self) -> None:
        self._arena.free(self.offset)


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
