"""A worker's heartbeat: once a second, whatever its main thread does, and what that is."""

import threading
import time

from engine.ipc import Outbox
from engine.messages import Activity, Beat

INTERVAL_S = 1.0


class Heart:
    """Beats from its own thread and socket: the main thread may be busy for long in what releases the interpreter."""

    def __init__(self, run_dir: str, rank: int):
        self._rank = rank
        self._beat = Beat(rank, "idle", time.monotonic())
        self._interrupted: Activity = "idle"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(run_dir,), name="heart", daemon=True)
        self._thread.start()

    def note(self, activity: Activity) -> None:
        """The main thread begins something, maybe the same again: cheap enough for every step."""
        self._beat = Beat(self._rank, activity, time.monotonic())

    def begin_compiling(self) -> None:
        """The main thread must make a kernel before it goes on."""
        self._interrupted = self._beat.activity
        self.note("compiling")

    def end_compiling(self) -> None:
        self.note(self._interrupted)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self, run_dir: str) -> None:
        outbox: Outbox[Beat] = Outbox(run_dir, "scheduler")
        while not self._stopping.wait(INTERVAL_S):
            outbox.send(self._beat)
        outbox.close()
