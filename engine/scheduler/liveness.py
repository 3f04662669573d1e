"""Liveness of the engine, from workers' heartbeats and the progress of requests."""

from engine.wire.messages import Activity, Heartbeat

LATE_S = 3.0  # three heartbeats are missing
MAX_S: dict[str, dict[Activity, float]] = {  # that an activity may take without progress
    "cuda": {"idle": 0.0, "step": 0.0, "images": 60.0, "compiling": 120.0},
    "cpu": {"idle": 0.0, "step": 600.0, "images": 600.0, "compiling": 120.0},
}


class Workers:
    def __init__(self, device: str) -> None:
        self._max_s = MAX_S[device]
        self._beats: dict[int, tuple[float, Heartbeat]] = {}

    def note(self, beat: Heartbeat, now: float) -> None:
        self._beats[beat.rank] = now, beat

    def alive_at(self, now: float, progress: float) -> float:
        """Return when the whole engine was last alive; `progress` is requests' last progress. A stopped worker counts even when idle."""
        beats = self._beats.values()
        if any(now - beat.since < self._max_s[beat.activity] for _, beat in beats):
            progress = now
        return min([progress, *(seen for seen, _ in beats if now - seen > LATE_S)])
