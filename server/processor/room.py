"""The processor's arena with a memory of who waits for it: room for images and token ids."""

import asyncio
from collections.abc import Callable

from engine.arena import Arena, ArenaFull, ArenaTooSmall
from server.region import Region

TIMEOUT_S = 10.0  # requests that wait for each other's room must not do so for ever


class Room:
    """Regions of one arena. `is_shared` says whether there is anybody who may give some back."""

    def __init__(self, arena: Arena, is_shared: Callable[[], bool]):
        self.arena = arena
        self._is_shared = is_shared
        self._came = asyncio.Event()

    def take(self, capacity: int) -> Region:
        """Raises ArenaFull or ArenaTooSmall."""
        return Region(self.arena, capacity)

    def check(self, num_bytes: int) -> None:
        """ArenaTooSmall if so much never fits."""
        if num_bytes > self.arena.size:
            raise ArenaTooSmall(f"{num_bytes} bytes exceed the arena of {self.arena.size} bytes")

    def give_back(self, region: Region) -> None:
        """Once for a region, when no thread reads or writes it any more. Whoever waits tries again."""
        region.free()
        self._came.set()
        self._came = asyncio.Event()

    async def take_patiently(self, capacity: int) -> Region:
        """Waits while others may give some back; then as `take`."""
        deadline = asyncio.get_running_loop().time() + TIMEOUT_S
        while True:
            came = self._came
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
