"""Scheduler's part of weight updates: requests end, all workers execute the order, and caches are emptied."""

import logging
import time
from collections.abc import Callable

from engine.scheduler.core import SchedulerCore
from engine.scheduler.state import is_idle
from engine.wire.updates import FromFolder, FromGroup, Order, OrderDone, OrderState, Pause, Resume

logger = logging.getLogger(__name__)

REFUSED = "the last update was refused: the engine continues after an update of all weights"


class UpdateControl:
    """Executes the api's orders, one update at a time. `send` reaches every worker, `answer` the api. After a refused part of an update the
    engine stays paused until all weights are updated: other parts may have been written."""

    def __init__(self, core: SchedulerCore, num_ranks: int, send: Callable[[Order], object], answer: Callable[[OrderDone], None]):
        self._core, self._num_ranks, self._send, self._answer = core, num_ranks, send, answer
        self._is_paused = self._is_mixed = False
        self._pauses: list[int] = []  # orders that wait for the last request
        self._update: Order | None = None
        self._states: list[OrderState] | None = None  # None: the update waits for the last request
        self._last_progress = 0.0

    def take(self, message: Order | OrderState) -> None:
        if isinstance(message, OrderState):
            self._last_progress = time.monotonic()
            if message.is_done:
                self._land(message)
            return
        match message.task:
            case Pause():
                self._is_paused = True
                self._pauses.append(message.number)
            case Resume():
                self._resume(message.number)
                return
            case _ if self._update is not None:
                self._done(message.number, "another update is in progress")
                return
            case _:
                self._update = message
        self._core.state.is_open = False
        if message.aborts:
            self._core.abort(None)

    def advance(self) -> None:
        """Continue if all requests have ended."""
        if self._core.num_in_flight or not is_idle(self._core.state):
            return
        self._end_pauses()
        if self._update is not None and self._states is None:
            self._states, self._last_progress = [], time.monotonic()
            self._send(self._update)

    def alive_at(self, now: float) -> float:
        """Return the time of the workers' last progress with an update; `now` without one."""
        return now if self._states is None else self._last_progress

    def _resume(self, number: int) -> None:
        if not self._is_mixed:
            self._is_paused = False
            self._end_pauses("resumed before all requests had ended")
            self._open()
        self._done(number, REFUSED if self._is_mixed else None)

    def _land(self, state: OrderState) -> None:
        """Conclude the update with the last rank's result."""
        assert self._update is not None and self._states is not None
        self._states.append(state)
        if len(self._states) < self._num_ranks:
            return
        order, problems = self._update, [each.problem for each in self._states if each.problem is not None]
        if not problems:
            self._core.forget_all(images=True)
            self._core.state.weight_version = order.version or self._core.state.weight_version
            self._is_mixed &= not all(each.is_whole for each in self._states)
        elif isinstance(order.task, FromGroup) or (isinstance(order.task, FromFolder) and len(problems) < self._num_ranks):
            self._is_mixed = True
        self._update = self._states = None
        self._open()
        self._done(order.number, next(iter(problems), None))

    def _open(self) -> None:
        if not (self._is_paused or self._is_mixed or self._update):
            self._core.state.is_open = True
            self._core.note_progress()

    def _end_pauses(self, problem: str | None = None) -> None:
        for number in self._pauses:
            self._done(number, problem)
        self._pauses.clear()

    def _done(self, number: int, problem: str | None = None) -> None:
        version = self._core.state.weight_version
        logger.info("order %d for weights: %s", number, problem or f"done, version {version}")
        self._answer(OrderDone(number, version, self._core.num_requests, problem))
