"""Wait for a condition without asserting anything about the machine's speed."""

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

HANG_GUARD_S = 60.0  # reached only if the condition never becomes true
INTERVAL_S = 0.01


def eventually(condition: Callable[[], object], what: str = "the condition", guard_s: float = HANG_GUARD_S) -> None:
    """Return when `condition()` is true; fail if it is still false after the hang guard."""
    deadline = time.monotonic() + guard_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not become true within {guard_s:.0f} s")
        time.sleep(INTERVAL_S)


async def eventually_async(condition: Callable[[], object | Awaitable[object]], what: str = "the condition") -> object:
    """Like `eventually`, but let the event loop run between two looks. A coroutine is awaited. Return the value that was true."""
    deadline = time.monotonic() + HANG_GUARD_S
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not become true within {HANG_GUARD_S:.0f} s")
        await asyncio.sleep(INTERVAL_S)
