"""A process that answers one question at a time and may be ended at any time: compilers of grammars, decoders of images.

Over its pipes go frames: 4 bytes of length and as many bytes. The first one, empty, says that it is ready.
"""

import asyncio
import contextlib
import multiprocessing
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import BinaryIO

from engine.launch.child import die_with_parent, settle_heap
from engine.launch.config import child_environment, python_command

LENGTH_BYTES = 4
MAX_CLIENTS = 1024  # whose use of a helper is remembered
WALL_S = 60.0  # of a child: only a busy machine takes so long for the CPU time that it has
END_S = 5.0  # until a process that has closed its output ends
START_S = 120.0  # importing takes seconds on a busy machine
FORK = multiprocessing.get_context("fork")


class HelperDied(RuntimeError):
    """The process ended instead of answering. `is_killed`: by SIGKILL, which is what the kernel sends when memory runs out."""

    def __init__(self, returncode: int | None):
        super().__init__(f"it ended with {returncode}")
        self.is_killed = returncode == -signal.SIGKILL


class ChildStopped(Exception):
    """The child of a helper was killed or exceeded its wall-clock limit. That depends on the machine's load, not on the question."""


class Helper:
    """Starts with the first question, and again after its end. For one question at a time."""

    def __init__(self, module: str, *arguments: str, fds: tuple[int, ...] = ()):
        self._module = module
        self._command = python_command(module, *arguments)
        self._fds = fds
        self._process: Process | None = None

    async def ask(self, question: bytes, timeout: float) -> bytes:
        """The answer. Raises TimeoutError after so many seconds, or HelperDied; then, or when it is cancelled, the process is gone and
        writes nothing any more. RuntimeError if it does not start."""
        if self._process is not None and self._process.returncode is not None:  # it ended while idle, not over this question
            await self.close()
        process = self._process or await self.start()
        assert process.stdin is not None
        try:
            async with asyncio.timeout(timeout):
                process.stdin.write(frame_of(question))
                await process.stdin.drain()
                return await _receive(process)
        except (asyncio.IncompleteReadError, ConnectionError) as problem:
            with contextlib.suppress(TimeoutError):  # `close` would reap a process that has just ended, and its return code would be lost
                await asyncio.wait_for(process.wait(), END_S)
            await self.close()
            raise HelperDied(process.returncode) from problem
        except (TimeoutError, asyncio.CancelledError):
            await self.close()
            raise

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                process.kill()
            await process.wait()

    async def start(self) -> Process:
        """RuntimeError if it does not start."""
        process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, env=child_environment(), start_new_session=True, pass_fds=self._fds
        )
        self._process = process
        try:
            async with asyncio.timeout(START_S):
                await _receive(process)
        except (TimeoutError, asyncio.IncompleteReadError) as problem:
            await self.close()
            raise RuntimeError(f"{self._module} does not start") from problem
        except asyncio.CancelledError:
            await self.close()
            raise
        return process


class Turns:
    """Of clients that share a helper. Next is the one that has used least of its time since it was idle, and its smallest question."""

    def __init__(self) -> None:
        self._is_taken = False
        self._used: Counter[bytes] = Counter()  # milliseconds by client
        self._waiting: list[tuple[bytes, int, asyncio.Future[None]]] = []

    @contextlib.asynccontextmanager
    async def take(self, client: bytes, size: int) -> AsyncIterator[None]:
        if self._is_taken:
            came = asyncio.get_running_loop().create_future()
            self._waiting.append((client, size, came))
            try:
                await came
            except asyncio.CancelledError:
                if not came.cancelled():  # it is this one's turn
                    self._pass_on()
                raise
        self._is_taken, started = True, time.monotonic()
        try:
            yield
        finally:
            self._used[client] += int(1e3 * (time.monotonic() - started))
            if len(self._used) > MAX_CLIENTS:  # those that used least are forgotten
                self._used = Counter(dict(self._used.most_common(MAX_CLIENTS // 2)))
            self._pass_on()

    def _pass_on(self) -> None:
        self._waiting = [waiting for waiting in self._waiting if not waiting[2].cancelled()]
        if self._waiting:
            following = min(self._waiting, key=lambda waiting: (self._used[waiting[0]], waiting[1]))
            self._waiting.remove(following)
            following[2].set_result(None)
        else:
            self._is_taken = False
            self._used.clear()


def answer_in_child(work: Callable[[], bytes], cpu_seconds: float, wall_seconds: float = WALL_S) -> bytes:
    """Fork a child and return its answer. Call it in a helper, which must not have threads. The child has ended when this function returns.

    Raises TimeoutError if the child exceeds its limit of CPU time, ChildStopped, or EOFError if the child ends by itself without an answer.
    """
    receiver, sender = FORK.Pipe(duplex=False)

    def run() -> None:
        die_with_parent(signal.SIGKILL)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal ends the process: a compiler cannot be stopped
        sender.send_bytes(work())

    child = FORK.Process(target=run)
    child.start()
    sender.close()
    try:
        if not receiver.poll(wall_seconds):
            raise ChildStopped
        return receiver.recv_bytes()
    except EOFError:
        child.join()
        if child.exitcode == -signal.SIGPROF:
            raise TimeoutError from None
        if child.exitcode in (-signal.SIGKILL, -signal.SIGTERM):
            raise ChildStopped from None
        raise
    finally:
        child.kill()
        child.join()
        receiver.close()


def answer_questions(answer: Callable[[bytes], bytes]) -> None:
    """Runs in the helper."""
    settle_heap()
    write_frame(sys.stdout.buffer, b"")
    while (question := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, answer(question))


def frame_of(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def write_frame(stream: BinaryIO, data: bytes) -> None:
    stream.write(frame_of(data))
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """None at the end of the stream."""
    head = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(head, "little")) if len(head) == LENGTH_BYTES else None


async def _receive(process: Process) -> bytes:
    assert process.stdout is not None
    head = await process.stdout.readexactly(LENGTH_BYTES)
    return await process.stdout.readexactly(int.from_bytes(head, "little"))
