"""Wait for a condition without asserting anything about the machine's speed."""

import asyncio
import time
from collections.abc import Callable

HANG_GUARD_S = 60.0  # reached only if the condition never becomes true
INTERVAL_S = 0.01


def eventually(condition: Callable[[], object], what: str = "the condition") -> None:
    """Return when `condition()` is true; fail if it is still false after the hang guard."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not become true within {HANG_GUARD_S:.0f} s")
        time.sleep(INTERVAL_S)


async def eventually_async(condition: Callable[[], object], what: str = "the condition") -> None:
    """Like `eventually`, but lets the event loop run between two looks."""
    deadline = time.monotonic() + HANG_GUARD_S
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not become true within {HANG_GUARD_S:.0f} s")
        await asyncio.sleep(INTERVAL_S)
