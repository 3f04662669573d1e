"""Guest processes: child processes that decode media or compile output constraints, and may be killed at any time.

The module's `prepare(*arguments)` returns the function that answers jobs. Pipes carry frames: a header with a job's CPU time limit in
milliseconds, and data. A guest's first frame reports that it is ready."""

import asyncio
import contextlib
import importlib
import os
import resource
import signal
import struct
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from typing import BinaryIO

from engine.wire.child import die_with_parent, settle_heap
from engine.wire.config import child_environment, python_command

HEADER = struct.Struct("<Ii")  # length of the data, number
NICENESS = 19  # the engine's own processes have priority
START_S = 120.0


class GuestDied(RuntimeError):
    """A guest ended without an answer: the job crashed it or exceeded its CPU time, or the guest was killed."""


class Guest:
    """A guest process, started by `GuestPool.start` or by a job that finds none."""

    def __init__(self, arguments: tuple[str, ...], fds: tuple[int, ...]):
        self._arguments, self._fds = arguments, fds
        self.process: Process | None = None

    async def ask(self, job: bytes, timeout: float, cpu_seconds: float) -> bytes:
        """Return the answer to a job. Raises GuestDied, TimeoutError (after killing the process), or RuntimeError if none starts."""
        if self.process is not None and self.process.returncode is not None:
            await self.close()
        process = self.process or await self.start()
        assert process.stdin is not None
        try:
            async with asyncio.timeout(timeout):
                process.stdin.write(HEADER.pack(len(job), int(1e3 * cpu_seconds)) + job)
                await process.stdin.drain()
                return await _receive(process)
        except (asyncio.IncompleteReadError, ConnectionError) as problem:
            await self.close()
            raise GuestDied from problem
        except (TimeoutError, asyncio.CancelledError):
            await self.close()
            raise

    async def start(self) -> Process:
        command = python_command("engine.wire.guests", *self._arguments)
        self.process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, env=child_environment(), start_new_session=True, pass_fds=self._fds
        )
        try:
            async with asyncio.timeout(START_S):
                await _receive(self.process)
            return self.process
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.CancelledError) as problem:
            await self.close()
            if isinstance(problem, asyncio.CancelledError):
                raise
            raise RuntimeError(f"{self._arguments[0]} could not be started") from problem

    async def close(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # already ended
                process.kill()
            await process.wait()


class GuestPool:
    """Guests that take jobs in their order. A guest may use `memory` bytes."""

    def __init__(self, size: int, module: str, *arguments: str, memory: int, fds: tuple[int, ...] = ()):
        self.guests = [Guest((module, str(memory), *arguments), fds) for _ in range(size)]
        self.idle = list(self.guests)
        self._may_begin = asyncio.Semaphore(size)

    async def close(self) -> None:
        for guest in self.guests:
            await guest.close()

    async def start(self) -> None:
        """Start one guest, for the first job, which would wait for it."""
        async with self._may_begin:
            guest = self.idle.pop()
            with contextlib.suppress(RuntimeError):  # the first job reports the error
                await guest.start()
            self.idle.append(guest)

    async def ask(self, job: bytes, timeout: float, cpu_seconds: float = 0.0) -> bytes:
        """As `Guest.ask`. A cancelled call returns after its job, which may write to an arena."""
        async with self._may_begin:
            task = asyncio.create_task(self._answer(job, timeout, cpu_seconds))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # a cancelled call raises no error of its job
            try:
                return await asyncio.shield(task)
            except asyncio.CancelledError:
                while not task.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait([task])
                raise

    async def _answer(self, job: bytes, timeout: float, cpu_seconds: float) -> bytes:
        guest = self.idle.pop()
        try:
            return await guest.ask(job, timeout, cpu_seconds)
        finally:
            self.idle.append(guest)


async def _receive(process: Process) -> bytes:
    assert process.stdout is not None
    length, _ = HEADER.unpack(await process.stdout.readexactly(HEADER.size))
    return await process.stdout.readexactly(length)


def serve(answer: Callable[[bytes], bytes], source: BinaryIO, sink: BinaryIO) -> None:
    def send(data: bytes) -> None:
        sink.write(HEADER.pack(len(data), 0) + data)
        sink.flush()

    settle_heap()
    send(b"")
    while len(head := source.read(HEADER.size)) == HEADER.size:
        length, milliseconds = HEADER.unpack(head)
        job = source.read(length)
        signal.setitimer(signal.ITIMER_PROF, milliseconds / 1e3)  # its signal ends the process
        data = answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(data)


if __name__ == "__main__":
    module, memory, *arguments = sys.argv[1:]
    die_with_parent(signal.SIGKILL)
    os.nice(NICENESS)
    prepared = importlib.import_module(module).prepare(*arguments)
    resource.setrlimit(resource.RLIMIT_DATA, (int(memory), int(memory)))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(prepared, sys.stdin.buffer, sys.stdout.buffer)
