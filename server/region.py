"""Region of an arena that is filled piece by piece and may grow or move meanwhile."""

from engine.wire.arena import Arena

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
