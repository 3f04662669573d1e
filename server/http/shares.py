"""Who may hold how much: a few slow clients must not keep all others out of the memory for bodies that still arrive."""

import contextlib
import heapq
import ipaddress
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TypeVar

from engine.arena import ArenaTooSmall
from server.errors import overloaded

Holder = TypeVar("Holder", bound=Hashable)

SMALL_BYTES = 1 << 20  # a body that finds room when large ones do not
RESERVED_PART = 1 / 8  # of the arena, for those
ADDRESS_PART = 3 / 4  # for all bodies of one address, unless it is a single one; a small one may go beyond as far as the reserve


def host_of(address: str) -> str:
    """Whose share an address has: an IPv6 client has its /64, from which it may take any."""
    if ":" not in address:
        return address
    with contextlib.suppress(ValueError):
        known = ipaddress.IPv6Address(address.partition("%")[0])
        return str(known.ipv4_mapped or ipaddress.IPv6Network((int(known), 64), strict=False))
    return address


def largest_holders(held: Mapping[Holder, int], address_of: Callable[[Holder], str], limit: int) -> list[Holder]:
    """Return the holders that must go so that the others hold at most `limit`: each time the largest one of the address that holds most."""
    of_address: dict[str, list[Holder]] = defaultdict(list)
    for holder in sorted(held, key=held.__getitem__):
        of_address[address_of(holder)].append(holder)
    totals = [(-sum(held[holder] for holder in holders), address) for address, holders in of_address.items()]
    excess = -sum(total for total, _ in totals) - limit
    heapq.heapify(totals)
    chosen: list[Holder] = []
    while excess > 0:
        total, address = heapq.heappop(totals)
        chosen.append(of_address[address].pop())
        excess -= held[chosen[-1]]
        if of_address[address]:
            heapq.heappush(totals, (total + held[chosen[-1]], address))
    return chosen


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

    def release(self) -> None:
        held = self._shares.held
        held[self._address] -= self.num_bytes
        self.num_bytes = 0
        if not held[self._address]:
            del held[self._address]


class Shares:
    """Of one arena, or of so many bytes. What is at most `small_bytes` may take the reserve."""

    def __init__(self, size: int, num_free: Callable[[], int] | None = None, small_bytes: int = SMALL_BYTES):
        self.held: Counter[str] = Counter()  # bytes by address
        self._size, self._small_bytes = size, small_bytes
        self._num_free = num_free or (lambda: size - self.held.total())
        self.max_bytes = size - int(RESERVED_PART * size)  # of one body

    @contextlib.contextmanager
    def claim(self, address: str) -> Iterator[Claim]:
        claim = Claim(self, host_of(address))
        try:
            yield claim
        finally:
            claim.release()

    def check(self, address: str, old: int, new: int) -> None:
        """Before a body takes `new` bytes instead of `old`. Errors as `Claim.grow_to`."""
        if new > self.max_bytes:
            raise ArenaTooSmall(f"{new} bytes exceed what one body may have")
        is_small = new <= self._small_bytes
        is_full = not is_small and self._num_free() - (new - old) < self._size - self.max_bytes
        others = self.held[address] - old
        if is_full or (others and others + new > (self.max_bytes if is_small else ADDRESS_PART * self._size)):
            raise overloaded("The server holds too many request bodies right now.")
