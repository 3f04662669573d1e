"""Concurrent work: jobs in threads that write to memory owned by the caller, and tasks of one request."""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


async def run(pool: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """Run a job in the pool. After cancellation it returns only when the job has ended, so that the job's memory can be freed."""
    return await result_of(pool.submit(job))


async def result_of(future: "Future[T]") -> T:
    """Return the result of a submitted job, as in `run`."""
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        await settled(future, waiter)
        raise
    finally:
        del future, waiter  # the job's exception references this frame


async def settled(future: "Future[T]", waiter: "asyncio.Future[T] | None" = None) -> None:
    """Wait until the job has ended, or has been cancelled before it began."""
    if not future.cancel():
        waiter = waiter or asyncio.wrap_future(future)
        await asyncio.wait([waiter])
        waiter.exception()  # retrieved, although the result is no longer needed


async def together(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Run these concurrently and return their results. Raise the first error, after the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]
