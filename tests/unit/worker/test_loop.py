"""When a worker without a plan uses its time."""

from types import SimpleNamespace
from typing import Any

from engine.messages import ImageSource, Prefetch, Region
from engine.worker.main import IDLE_POLL_S, PAUSE_S, run


def test_a_pause_between_two_requests_is_used() -> None:
    """Red if what was seen often enough is not prepared between two requests, or if an idle worker wakes up more often than it must."""
    prefetch = Prefetch(ImageSource("jpeg", Region(1, 0, 1000), 720, 1280), (1, 44, 80))
    messages: list[Prefetch | None] = [None, prefetch, None, None, None, None, prefetch, None, None]
    prepares = [False, True, True, False, False, False, False]
    timeouts: list[float] = []
    stopping = SimpleNamespace(is_set=lambda: not messages)

    def recv(timeout: float) -> Prefetch | None:
        timeouts.append(timeout)
        return messages.pop(0)

    runner: Any = SimpleNamespace(images=SimpleNamespace(prefetch=lambda message: None), use_spare_time=lambda is_busy: prepares.pop(0))
    anything: Any = SimpleNamespace(recv=recv, note=lambda activity: None)
    run(runner, anything, anything, anything, stopping, anything)  # type: ignore[arg-type]
    is_pause = [timeout == PAUSE_S for timeout in timeouts]
    assert is_pause == [False, False, True, True, True, False, False, True, False] and set(timeouts) == {PAUSE_S, IDLE_POLL_S}
    assert not prepares
