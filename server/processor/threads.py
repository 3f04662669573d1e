"""Work in threads that write to memory which somebody else gives back. Used by the other files of this folder."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


async def run(pool: ThreadPoolExecutor, job: Callable[[], T]) -> T:
    """Runs a job in a pool. When cancelled, returns only after the job has: its memory may then be given back."""
    future = pool.submit(job)
    waiter = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiter)
    except asyncio.CancelledError:
        if not future.cancel():
            await asyncio.wait([waiter])
            waiter.exception()  # taken note of: nobody wants to know any more
        raise
