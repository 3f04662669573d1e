"""How long a worker without a plan waits until it uses its spare time."""

from types import SimpleNamespace
from typing import Any

from engine.messages import ImageSource, Prefetch, Region
from engine.worker.main import IDLE_POLL_S, PAUSE_S, run


def test_a_pause_between_two_requests_is_used() -> None:
    """Red if spare time is not used soon after a message, or if an idle worker wakes up more often than it must."""
    prefetch = Prefetch(ImageSource("jpeg", Region(1, 0, 1000), 720, 1280), (1, 44, 80))
    #          message or None, whether spare time is used then: the next wait is short after a message and after use
    script: list[tuple[Any, bool]] = [(None, False), (prefetch, True), (None, True), (None, False), (None, False)]
    waits: list[float] = []
    used = [uses for message, uses in script if message is None]

    def recv(timeout: float) -> Any:
        waits.append(timeout)
        return script.pop(0)[0]

    runner: Any = SimpleNamespace(images=SimpleNamespace(prefetch=lambda message: None), use_spare_time=lambda is_busy: used.pop(0))
    link: Any = SimpleNamespace(recv=recv, note=lambda activity: None)
    run(runner, link, link, link, SimpleNamespace(is_set=lambda: not script), link)  # type: ignore[arg-type]
    assert waits == [IDLE_POLL_S, IDLE_POLL_S, PAUSE_S, PAUSE_S, IDLE_POLL_S] and not used
