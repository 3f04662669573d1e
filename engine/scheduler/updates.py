"""Scheduler's part of weight updates: requests end, then all workers prepare a job, then all execute it.

Job ──▶ close ──▶ idle ──▶ workers prepare ──▶ all can? ──▶ workers execute ──▶ caches are emptied ──▶ OrderDone, open
                                            └──▶ one cannot: it is dropped, nothing has been written ──▶ OrderDone, open
"""

import logging
import time
from collections.abc import Callable

from engine.scheduler.core import SchedulerCore
from engine.scheduler.state import is_idle
from engine.wire.updates import (
    FIRST_VERSION,
    FromFolder,
    FromGroup,
    Job,
    JobState,
    Order,
    OrderDone,
    Pause,
    Progress,
    Resume,
    Verdict,
    metadata_of,
)

logger = logging.getLogger(__name__)

MIXED = "the weights are a mixture of old and new: some updates since the pause failed and others did not. Update all weights at once"


class UpdateControl:
    """Executes orders of the api, one job at a time. `send` reaches every worker, `answer` the api."""

    def __init__(self, core: SchedulerCore, num_ranks: int, send: Callable[[Job | Verdict], object], answer: Callable[[OrderDone], None]):
        self._core, self._num_ranks, self._send, self._answer = core, num_ranks, send, answer
        self._is_paused = False
        self._pauses: list[int] = []  # orders that wait for the last request
        self._job: Job | None = None
        self._states: list[JobState] | None = None  # of the job, while workers prepare or execute it
        self._is_executing = False
        self._last_progress = 0.0  # of the workers
        self._has_written = self._has_refused = False  # updates of some weights since the pause
        self._rename(FIRST_VERSION)

    def take(self, message: Order | JobState | Progress) -> None:
        if isinstance(message, JobState | Progress):
            self._last_progress = time.monotonic()
        match message:
            case Pause():
                self._is_paused = True
                self._pauses.append(message.number)
                self._close(message.aborts)
            case Resume():
                self._resume(message.number)
            case Job() if self._job is not None:
                self._done(message.number, "another update is in progress")
            case Job():
                self._job = message
                self._close(message.aborts)
            case JobState():
                assert self._states is not None and self._job is not None
                self._states.append(message)
                if len(self._states) == self._num_ranks:
                    self._conclude(self._job, self._states)

    def advance(self) -> None:
        """Continue if all requests have ended."""
        if self._core.num_in_flight or not is_idle(self._core.state):
            return
        for number in self._pauses:
            self._done(number)
        self._pauses.clear()
        if self._job is not None and self._states is None:
            self._states, self._last_progress = [], time.monotonic()
            self._send(self._job)

    def alive_at(self, now: float) -> float:
        """Return the time of the workers' last progress with a job; `now` without a job."""
        return now if self._states is None else self._last_progress

    def _resume(self, number: int) -> None:
        if self._has_written and self._has_refused:
            self._done(number, MIXED)
            return
        for pause in self._pauses:
            self._done(pause, "resumed before all requests had ended")
        self._pauses.clear()
        self._is_paused = self._has_written = self._has_refused = False
        self._open()
        self._done(number)

    def _conclude(self, job: Job, states: list[JobState]) -> None:
        problem = next((state.problem for state in states if state.problem is not None), None)
        self._states = []
        if not self._is_executing:
            self._send(Verdict(problem is None))
            self._is_executing = problem is None
            if problem is None:
                return
        if isinstance(job.task, FromFolder | FromGroup):
            if problem is None:
                self._core.forget_all(images=True)
            self._note_mixture(problem is None, all(state.is_whole for state in states))
        if problem is None:
            self._rename(job.version or self._version)
        logger.info("%s: %s", type(job.task).__name__, problem or f"done, weights have version {self._version}")
        self._job, self._states, self._is_executing = None, None, False
        self._open()
        self._done(job.number, problem)

    def _note_mixture(self, is_written: bool, is_whole: bool) -> None:
        """Note an update. Those between pause and resume belong together, in any order, unless one replaces all weights."""
        if is_written and is_whole:
            self._has_written = self._has_refused = False
        elif self._is_paused:
            self._has_written, self._has_refused = self._has_written or is_written, self._has_refused or not is_written

    def _rename(self, version: str) -> None:
        self._version, self._core.state.metadata = version, metadata_of(version)

    def _close(self, aborts: bool) -> None:
        self._core.state.is_open = False
        if aborts:
            self._core.abort(None)

    def _open(self) -> None:
        state = self._core.state
        if self._is_paused or self._job is not None:
            return
        state.is_open, parked, state.parked = True, state.parked, []
        for request in parked:
            state.add(request)

    def _done(self, number: int, problem: str | None = None) -> None:
        self._answer(OrderDone(number, self._version, self._core.num_requests, problem))
