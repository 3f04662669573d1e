"""Slots on the device that some requests need in addition to a row, blocks and images."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from engine.scheduler.request import Request
from engine.wire.adapters import AdapterRead, ReadAdapter
from engine.wire.messages import EngineRequest, ErrorInfo, Load
from engine.wire.metric import Info


class Slots(Protocol):
    """Slots as the core uses them."""

    def begin_plan(self) -> None:
        """Begin a plan, during which `may_start` is called once per request, in order."""

    def may_start(self, wire: EngineRequest) -> bool:
        """Return whether the slot of this request is free."""

    def acquire(self, wire: EngineRequest) -> int:
        """Return the slot of a request that starts, after `may_start`; -1: it needs none."""

    def release(self, wire: EngineRequest) -> None:
        """Release the slot of a request that is preempted or ends."""

    def of_images(self, request: Request) -> int:
        """Return the slot with which this running request's images are encoded; -1: none."""

    def take_loads(self) -> Sequence[Load]:
        """Return the orders since the last call, for the next plan."""

    def take_reads(self) -> Sequence[ReadAdapter]:
        """Return the orders to read since the last call, to be sent after the plan."""

    def note_read(self, read: AdapterRead) -> None:
        """Note a rank's answer to such an order."""

    def infos(self, running: Iterable[Request], waiting: Iterable[Request]) -> list[Info]:
        """Return metrics about the slots of these requests."""

    def error_of(self, wire: EngineRequest) -> ErrorInfo | None:
        """Return the reason why a request can never run, if there is one."""
