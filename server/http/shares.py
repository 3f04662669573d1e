"""Who may hold how much of the api's arena with bodies that still arrive: a few slow clients must not keep all others out. Used by
`server/http/body.py`.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

from engine.arena import Arena, ArenaTooSmall
from server.errors import overloaded

SMALL_BYTES = 1 << 20  # a body that finds room when large ones do not
RESERVED_PART = 1 / 8  # of the arena, for those
ADDRESS_PART = 3 / 4  # for all bodies of one address, unless it is a single one; a small one may go beyond as far as the reserve


class Claim:
    """What one body holds."""

    def __init__(self, shares: "Shares", address: str):
        self._shares = shares
        self._address = address
        self.num_bytes = 0

    def grow_to(self, num_bytes: int) -> None:
        """RequestError 503 if others must have the room, ArenaTooSmall if there can never be so much."""
        if num_bytes > self.num_bytes:
            self._shares.check(self._address, self.num_bytes, num_bytes)
            self._shares.held[self._address] += num_bytes - self.num_bytes
            self.num_bytes = num_bytes


class Shares:
    """Of one arena."""

    def __init__(self, arena: Arena):
        self.held: Counter[str] = Counter()  # bytes by address
        self._arena = arena
        self.max_bytes = arena.size - int(RESERVED_PART * arena.size)  # of one body

    @contextlib.contextmanager
    def claim(self, address: str) -> Iterator[Claim]:
        """While a body arrives."""
        claim = Claim(self, address)
        try:
            yield claim
        finally:
            self.held[address] -= claim.num_bytes
            if not self.held[address]:
                del self.held[address]

    def check(self, address: str, old: int, new: int) -> None:
        """Before a body that holds `old` bytes takes `new` instead. Errors as `Claim.grow_to`."""
        if new > self.max_bytes:
            raise ArenaTooSmall(f"{new} bytes exceed what one body may have")
        is_small = new <= SMALL_BYTES
        is_full = not is_small and self._arena.num_free - (new - old) < self._arena.size - self.max_bytes
        others = self.held[address] - old
        if is_full or (others and others + new > (self.max_bytes if is_small else ADDRESS_PART * self._arena.size)):
            raise overloaded("The server holds too many request bodies right now.")
