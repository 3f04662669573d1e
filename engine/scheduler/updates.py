"""Scheduler's part of weight updates: requests end, all workers execute the order, and caches are emptied."""

import logging
import time
from collections.abc import Callable

from engine.scheduler.core import SchedulerCore
from engine.scheduler.state import is_idle
from engine.wire.updates import Order, OrderDone, OrderResult

logger = logging.getLogger(__name__)

MAX_UPDATE_S = 600.0  # that workers may take for an update before it counts as hung


class UpdateControl:
    """Executes the api's orders, one after the other. `send` reaches every worker, `answer` the api. RuntimeError if only some ranks have
    written an update."""

    def __init__(self, core: SchedulerCore, num_ranks: int, send: Callable[[Order], object], answer: Callable[[OrderDone], None]):
        self._core, self._num_ranks, self._send, self._answer = core, num_ranks, send, answer
        self._is_paused = self._is_sent = False
        self._update: Order | None = None
        self._results: list[OrderResult] = []
        self._sent_at = 0.0

    def alive_at(self, now: float) -> float:
        """Return `now`, or when the update was sent that takes too long."""
        return self._sent_at if self._is_sent and now - self._sent_at > MAX_UPDATE_S else now

    def take(self, message: Order | OrderResult) -> None:
        if isinstance(message, OrderResult):
            self._land(message)
        elif isinstance(message.task, str):
            self._is_paused = message.task == "pause"
            self._close(aborts=True) if self._is_paused else self._open()
            self._done()
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
        order, problems = self._update, [each.problem for each in self._results if each.problem is not None]
        assert order is not None
        if 0 < len(problems) < self._num_ranks:
            raise RuntimeError(f"only some workers have new weights, so the engine exits: {problems[0]}")
        if not problems:
            self._core.forget_all(images=True)
            self._core.state.weight_version = order.version or self._core.state.weight_version
        self._update, self._results, self._is_sent = None, [], False
        self._open()
        self._done(next(iter(problems), None))

    def _close(self, aborts: bool) -> None:
        self._core.state.is_open = False
        if aborts:
            self._core.abort(None)

    def _open(self) -> None:
        if not self._is_paused:
            self._core.state.is_open = True
            self._core.note_progress()

    def _done(self, problem: str | None = None) -> None:
        version = self._core.state.weight_version
        logger.info("order for weights: %s", problem or f"done, version {version}")
        self._answer(OrderDone(version, problem))
