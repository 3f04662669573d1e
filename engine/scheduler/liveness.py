"""Whether the engine lives, by what workers say of themselves and by the progress of requests. Used by `engine.scheduler.main`."""

from engine.messages import Activity, Beat

LATE_S = 3.0  # without a beat: three are missing
MAX_S: dict[str, dict[Activity, float]] = {  # how long a worker may do something that makes no progress meanwhile
    "cuda": {"idle": 0.0, "step": 0.0, "images": 60.0, "compiling": 120.0},
    "cpu": {"idle": 0.0, "step": 600.0, "images": 600.0, "compiling": 120.0},
}


class Workers:
    """The last beat of each; that it is ready counts as the first."""

    def __init__(self, device: str) -> None:
        self._max_s = MAX_S[device]
        self._beats: dict[int, tuple[float, Beat]] = {}

    def note(self, beat: Beat, now: float) -> None:
        """A beat has come."""
        self._beats[beat.rank] = now, beat

    def alive_at(self, now: float, progress: float) -> float:
        """When all of the engine last was alive, if `progress` is when its requests last made any. A worker that is stopped counts also
        when there are no requests; one that reads large images, makes a kernel, or computes on a CPU, is no deadlock."""
        beats = self._beats.values()
        if any(now - beat.since < self._max_s[beat.activity] for _, beat in beats):
            progress = now
        return min([progress, *(seen for seen, _ in beats if now - seen > LATE_S)])
