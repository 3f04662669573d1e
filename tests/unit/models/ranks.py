"""Starts the ranks of a test."""

from collections.abc import Callable

from torch import multiprocessing


def start_ranks(worker: Callable[..., None], size: int, *arguments: object) -> None:
    """Calls `worker(rank, size, *arguments)` in a process for each rank and waits for all. They are forked from a process without threads
    that has imported the first worker's module: each of them would take seconds to."""
    multiprocessing.set_forkserver_preload([worker.__module__])
    multiprocessing.start_processes(worker, args=(size, *arguments), nprocs=size, start_method="forkserver")
