"""Heartbeat of a worker: once per second, with the activity of its main thread."""

import threading
import time

from engine.wire.ipc import Outbox
from engine.wire.messages import Activity, Heartbeat

INTERVAL_S = 1.0


class HeartbeatThread:
    """Sends heartbeats from a socket of its own: the main thread may be busy for long in calls that release the interpreter lock."""

    def __init__(self, run_dir: str, rank: int):
        self._rank = rank
        self._beat = Heartbeat(rank, "idle", time.monotonic())
        self._interrupted: Activity = "idle"
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(run_dir,), name="heartbeat", daemon=True)
        self._thread.start()

    def note(self, activity: Activity) -> None:
        self._beat = Heartbeat(self._rank, activity, time.monotonic())

    def begin_compiling(self) -> None:
        """Note that the main thread must compile a kernel before it continues."""
        self._interrupted = self._beat.activity
        self.note("compiling")

    def end_compiling(self) -> None:
        self.note(self._interrupted)

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self, run_dir: str) -> None:
        outbox: Outbox[Heartbeat] = Outbox(run_dir, "scheduler")
        while not self._stopping.wait(INTERVAL_S):
            outbox.send(self._beat)
        outbox.close()
