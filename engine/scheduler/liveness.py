"""Whether the engine lives, by what workers say of themselves and by the progress of requests. Used by `engine.scheduler.main`."""

from engine.messages import Beat

LATE_S = 3.0  # without a beat: three are missing
READING_S = 60.0  # so long may a worker read the images of one step


class Workers:
    """The last beat of each."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[float, Beat]] = {}

    def note(self, beat: Beat, now: float) -> None:
        """A beat has come."""
        self._beats[beat.rank] = now, beat

    def alive_at(self, now: float, progress: float) -> float:
        """When all of the engine last was alive, if `progress` is when its requests last made any. A worker that is stopped counts also
        when there are no requests; one that reads large images is no deadlock."""
        beats = self._beats.values()
        if any(beat.activity == "images" and now - beat.since < READING_S for _, beat in beats):
            progress = now
        return min([progress, *(seen for seen, _ in beats if now - seen > LATE_S)])
