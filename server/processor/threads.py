"""Work in threads that write to memory which somebody else gives back."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def run(pool: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """Runs a job. When cancelled, returns only after the job has: its memory may then be given back."""
    return await result_of(pool.submit(job))


async def result_of(future: "Future[T]") -> T:
    """As `run`, for a job that was submitted."""
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        await settled(future, waiter)
        raise
    finally:
        del future, waiter  # what a job raises names this frame


async def settled(future: "Future[T]", waiter: "asyncio.Future[T] | None" = None) -> None:
    """The job has not begun and never will, or it has ended."""
    if not future.cancel():
        waiter = waiter or asyncio.wrap_future(future)
        await asyncio.wait([waiter])
        waiter.exception()  # taken note of: nobody wants to know any more
