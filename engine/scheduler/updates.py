"""Scheduler's part of weight updates: requests end, all workers execute the order, and caches are emptied."""

import logging
import time
from collections.abc import Callable

from engine.scheduler.core import SchedulerCore
from engine.scheduler.state import is_idle
from engine.wire.updates import FromFolder, FromGroup, Order, OrderDone, OrderResult, Pause, Resume

logger = logging.getLogger(__name__)

MAX_UPDATE_S = 600.0  # that workers may take for an update before it counts as hung
REFUSED = "the last update was refused: the engine continues after an update of all weights"


class UpdateControl:
    """Executes the api's orders, one update at a time. `send` reaches every worker, `answer` the api. After a refused part of an update the
    engine stays paused until all weights are updated: other parts may have been written."""

    def __init__(self, core: SchedulerCore, num_ranks: int, send: Callable[[Order], object], answer: Callable[[OrderDone], None]):
        self._core, self._num_ranks, self._send, self._answer = core, num_ranks, send, answer
        self._is_paused = self._is_mixed = self._is_sent = False
        self._update: Order | None = None
        self._results: list[OrderResult] = []
        self._sent_at = 0.0

    def alive_at(self, now: float) -> float:
        """Return `now`, or when the update was sent that takes too long."""
        return self._sent_at if self._is_sent and now - self._sent_at > MAX_UPDATE_S else now

    def take(self, message: Order | OrderResult) -> None:
        if isinstance(message, OrderResult):
            self._land(message)
        elif isinstance(message.task, Resume):
            self._is_paused = self._is_paused and self._is_mixed
            self._open()
            self._done(message.number, REFUSED if self._is_mixed else None)
        elif isinstance(message.task, Pause):
            self._is_paused = True
            self._close(aborts=True)
            self._done(message.number)
        elif self._update is not None:
            self._done(message.number, "another update is in progress")
        else:
            self._update = message
            self._close(message.aborts)

    def advance(self) -> None:
        """Start the update when all requests have ended."""
        if self._update is not None and not self._is_sent and not self._core.num_in_flight and is_idle(self._core.state):
            self._is_sent, self._sent_at = True, time.monotonic()
            self._send(self._update)

    def _land(self, result: OrderResult) -> None:
        """Conclude the update with the last rank's result."""
        self._results.append(result)
        if len(self._results) < self._num_ranks:
            return
        order, results, problems = self._update, self._results, [each.problem for each in self._results if each.problem is not None]
        assert order is not None
        if not problems:
            self._core.forget_all(images=True)
            self._core.state.weight_version = order.version or self._core.state.weight_version
            self._is_mixed &= not all(each.is_whole for each in results)
        elif isinstance(order.task, FromGroup) or (isinstance(order.task, FromFolder) and len(problems) < self._num_ranks):
            self._is_mixed = True
        self._update, self._results, self._is_sent = None, [], False
        self._open()
        self._done(order.number, next(iter(problems), None))

    def _close(self, aborts: bool) -> None:
        self._core.state.is_open = False
        if aborts:
            self._core.abort(None)

    def _open(self) -> None:
        if not (self._is_paused or self._is_mixed or self._update):
            self._core.state.is_open = True
            self._core.note_progress()

    def _done(self, number: int, problem: str | None = None) -> None:
        version = self._core.state.weight_version
        logger.info("order %d for weights: %s", number, problem or f"done, version {version}")
        self._answer(OrderDone(number, version, problem))
