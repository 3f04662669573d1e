"""Requests whose body may still arrive: their images are taken up already, and the scheduler hears of the first new one.

Used by the processor.

    Payload ──▶ base64 ──▶ header ──▶ sha256 ──▶ ready for the request
                              └▶ new, and a plain JPEG ──▶ Upcoming ──▶ scheduler, while the rest is prepared
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from engine.arena import Arena
from engine.ipc import Outbox
from engine.messages import Region, ToScheduler, Upcoming
from server.media import Beginning, Glimpse, MediaLoader
from server.region import Holdings

NUM_REMEMBERED = 4096  # images that were seen; one that is forgotten may be read once too often


@dataclass(slots=True)
class Arrival:
    """What is known of a request before its Submit: images that are worked on, by the offset of their payload, in their order."""

    holdings: Holdings
    begun: dict[int, Beginning] = field(default_factory=dict)
    glimpses: dict[int, Glimpse] = field(default_factory=dict)
    num_passed: int = 0  # images at the beginning that were looked at
    is_announced: bool = False


class Arrivals:
    """By request. An arrival is there from its first message, or the first look at it, until it is popped."""

    def __init__(self, arena: Arena, loader: MediaLoader, scheduler: Outbox[ToScheduler]):
        self._arena = arena
        self._loader = loader
        self._scheduler = scheduler
        self._arrivals: dict[int, Arrival] = {}
        self._seen: OrderedDict[bytes, None] = OrderedDict()  # least recently first

    def __len__(self) -> int:
        return len(self._arrivals)

    def get(self, rid: int) -> Arrival:
        if rid not in self._arrivals:
            self._arrivals[rid] = Arrival(Holdings(self._arena))
        return self._arrivals[rid]

    def pop(self, rid: int) -> Arrival:
        arrival = self.get(rid)
        del self._arrivals[rid]
        return arrival

    def begin(self, rid: int, payload: Region) -> None:
        """Starts to decode an image, unless that was done when its Payload came."""
        arrival = self.get(rid)
        if payload.offset not in arrival.begun:

            def note(glimpse: Glimpse) -> None:
                arrival.glimpses[payload.offset] = glimpse
                self._announce(rid, arrival)

            arrival.begun[payload.offset] = self._loader.begin(payload, arrival.holdings, note)

    def _announce(self, rid: int, arrival: Arrival) -> None:
        """Passes the images in their order, as far as they were looked at. One that was seen before has been encoded, as a rule."""
        for offset in list(arrival.begun)[arrival.num_passed :]:
            glimpse = arrival.glimpses.get(offset)
            if glimpse is None:
                return
            arrival.num_passed += 1
            is_new = self._is_new(glimpse.fingerprint)
            if is_new and glimpse.source is not None and not arrival.is_announced:
                arrival.is_announced = True
                self._scheduler.send(Upcoming(rid, glimpse.source))

    def _is_new(self, fingerprint: bytes) -> bool:
        is_new = fingerprint not in self._seen
        self._seen[fingerprint] = None
        self._seen.move_to_end(fingerprint)
        if len(self._seen) > NUM_REMEMBERED:
            self._seen.popitem(last=False)
        return is_new
