"""Scheduler's part of weight updates: requests are drained, then all workers prepare a job, then all execute it.

Job ──▶ close ──▶ drained ──▶ workers prepare ──▶ all can? ──▶ workers execute ──▶ caches are emptied ──▶ OrderDone, open
                                              └──▶ one cannot: it is dropped, nothing has been written ──▶ OrderDone, open
"""

import logging
from collections import deque
from collections.abc import Callable

from engine.scheduler.core import SchedulerCore
from engine.scheduler.state import is_idle
from engine.wire.updates import (
    FIRST_VERSION,
    Drain,
    FromFolder,
    FromGroup,
    FromMemory,
    Job,
    JobState,
    Order,
    OrderDone,
    Pause,
    Resume,
    Verdict,
    metadata_of,
)

logger = logging.getLogger(__name__)

MIXED = (
    "the weights are a mixture of old and new: an update in several requests failed after its first one. "
    "Send the rest, or update from a folder"
)


class UpdateControl:
    """Executes orders of the api, one job at a time. `send` reaches every worker, `answer` the api."""

    def __init__(self, core: SchedulerCore, num_ranks: int, send: Callable[[Job | Verdict], object], answer: Callable[[OrderDone], None]):
        self._core, self._num_ranks, self._send, self._answer = core, num_ranks, send, answer
        self._is_paused = False
        self._pauses: list[int] = []  # orders that wait for the last request
        self._jobs: deque[Job] = deque()
        self._states: list[JobState] | None = None  # of the first job, which workers prepare or execute
        self._is_executing = False
        self._num_partial = 0  # updates since the pause that were not of all tensors
        self._is_mixed = False
        self._rename(FIRST_VERSION)

    def take(self, message: Order | JobState) -> None:
        match message:
            case Pause():
                self._is_paused = True
                self._pauses.append(message.number)
                self._close(message.drain)
            case Resume():
                self._resume(message.number)
            case Job():
                self._jobs.append(message)
                self._close(message.drain)
            case JobState():
                assert self._states is not None
                self._states.append(message)
                if len(self._states) == self._num_ranks:
                    self._note(self._jobs[0], [state.problem for state in self._states if state.problem is not None])

    def advance(self) -> None:
        """Continue if all requests have ended, or have been set aside."""
        if self._core.num_in_flight or not is_idle(self._core.state):
            return
        for number in self._pauses:
            self._done(number)
        self._pauses.clear()
        if self._jobs and self._states is None:
            self._states = []
            self._send(self._jobs[0])

    def _resume(self, number: int) -> None:
        if self._is_mixed:
            self._done(number, MIXED)
            return
        for pause in self._pauses:
            self._done(pause, "resumed before all requests had ended")
        self._pauses.clear()
        self._is_paused, self._num_partial = False, 0
        self._open()
        self._done(number)

    def _note(self, job: Job, problems: list[str]) -> None:
        if not self._is_executing:
            self._is_executing = not problems
            self._states = []
            self._send(Verdict(not problems))
            if not problems:
                return
        elif isinstance(job.task, FromFolder | FromMemory | FromGroup):
            self._core.forget_all(images=True)
        if not problems:
            self._rename(job.version or self._version)
        self._note_mixture(job, bool(problems))
        logger.info("%s: %s", type(job.task).__name__, problems[0] if problems else f"done, weights have version {self._version}")
        self._states, self._is_executing = None, False
        self._jobs.popleft()
        self._open()
        self._done(job.number, problems[0] if problems else None)

    def _note_mixture(self, job: Job, is_refused: bool) -> None:
        """Track whether weights are a mixture: several updates of some tensors between pause and resume belong together."""
        if isinstance(job.task, FromFolder) and not is_refused:
            self._num_partial, self._is_mixed = 0, False
        elif isinstance(job.task, FromMemory | FromGroup) and self._is_paused:
            self._num_partial += not is_refused
            self._is_mixed = is_refused and self._num_partial > 0

    def _rename(self, version: str) -> None:
        self._version, self._core.state.metadata = version, metadata_of(version)

    def _close(self, drain: Drain) -> None:
        """Start no new requests. Running requests finish ("wait"), end now ("abort"), or are set aside to be computed again ("keep")."""
        state = self._core.state
        state.is_open = False
        if drain == "abort":
            self._core.abort(None)
        while drain == "keep" and state.running:
            state.preempt(state.running[-1])
        if drain == "keep":
            state.parked += state.waiting
            state.waiting.clear()

    def _open(self) -> None:
        state = self._core.state
        if self._is_paused or self._jobs:
            return
        state.is_open, parked, state.parked = True, state.parked, []
        for request in parked:
            state.add(request)

    def _done(self, number: int, problem: str | None = None) -> None:
        self._answer(OrderDone(number, self._version, self._core.num_requests, problem))
