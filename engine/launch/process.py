"""Servers as child processes. `engine.launch.process PARENT_PID CPU,CPU,... MODULE ARGUMENT...` starts a module that ends with its parent.

A `preexec_fn` could not do the latter: it may wait forever for a lock that another thread of the parent holds."""

import asyncio
import contextlib
import os
import runpy
import signal
import sys
from collections.abc import Collection

import msgspec

from engine.launch.supervise import ChildDied, how_it_ended
from engine.wire.child import die_with_parent
from engine.wire.config import UNIX_HOST, EngineConfig, python_command, server_environment

KILL_S = 20  # after --shutdown-timeout; the server waits 10 s for its own processes
PATIENCE_S = 30
READY = "ready after "
MAX_LINE = 1 << 20  # characters of a log line


def command_of(cpus: Collection[int], module: str, *arguments: str) -> list[str]:
    """Return a command that uses these CPUs (none: all) and ends with this process."""
    return python_command("engine.launch.process", str(os.getpid()), ",".join(map(str, sorted(cpus))), module, *arguments)


async def end_process(process: asyncio.subprocess.Process, grace: float) -> None:
    """End a process, after `grace` seconds by SIGKILL."""
    with contextlib.suppress(ProcessLookupError):  # it has ended
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), grace)
    except TimeoutError:
        process.kill()
        await process.wait()


class ServerProcess:
    """`python -m engine.serve` on a Unix socket that only this program uses or, as engine `index` of several, on its port, with its share
    of the GPUs and log lines that begin with its number. It ends by `stop`, or with the thread that started it."""

    def __init__(self, config: EngineConfig, cpus: Collection[int] = (), gpus: int | None = None, index: int | None = None):
        if index is None:
            config = msgspec.structs.replace(config, host=UNIX_HOST)
        self._config, self._index = config, index
        self._command = command_of(cpus, "engine.serve")
        self._environment = server_environment(config, gpus)
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.ready = ""  # the line that it has printed when it was ready
        self.death: str | None = None  # reason why it has ended

    @property
    def path(self) -> str:
        return self.ready.removeprefix(UNIX_HOST)

    @property
    def code(self) -> int:
        return 1 if self._process is None else self._process.returncode or 1

    async def start(self) -> None:
        """Wait until the server is ready. Raises ValueError or ChildDied with the server's reason."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            pipe = asyncio.subprocess.PIPE
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=None if self._index is None else pipe,
                limit=MAX_LINE, start_new_session=True, env=self._environment,
            )  # fmt: skip
            assert self._process.stdout is not None
            first = (await self._process.stdout.readline()).decode()
            is_ready = first.startswith((UNIX_HOST, READY))
            self._ended = asyncio.create_task(self._watch(self._process, "" if is_ready else first))
            if not is_ready:
                await self._ended
                raise (ValueError if self.code == 2 else ChildDied)(self.death)
            self.ready = first.strip()
            undo.pop_all()

    async def wait(self) -> None:
        assert self._ended is not None
        await asyncio.shield(self._ended)

    async def stop(self) -> None:
        """End the server. Every caller waits until it has ended; cancelling a caller interrupts nothing."""
        self._stopping = self._stopping or asyncio.create_task(self._end())
        await asyncio.shield(self._stopping)

    async def lost(self, problem: Exception) -> Exception:
        """Return the reason for a broken connection: ChildDied if the server ends within PATIENCE_S, else `problem`."""
        if self._ended is not None:
            await asyncio.wait([self._ended], timeout=PATIENCE_S)
        return problem if self.death is None else ChildDied(self.death)

    async def _watch(self, process: asyncio.subprocess.Process, output: str) -> None:
        assert process.stdout is not None
        log = asyncio.create_task(_copy(process.stderr, f"engine-{self._index} ")) if process.stderr is not None else None
        rest = (await process.stdout.read()).decode()  # until its last process has ended
        how = f"the engine {how_it_ended(await process.wait())}"
        self.death = ((output + rest).strip() if self._index is None else "") or how
        if log is not None:
            await log

    async def _end(self) -> None:
        if self._process is not None:
            await end_process(self._process, self._config.shutdown_timeout + KILL_S)
        if self._ended is not None:
            await self._ended


async def _copy(log: asyncio.StreamReader, prefix: str) -> None:
    while True:
        try:
            line = await log.readline()
        except ValueError:  # longer than MAX_LINE: skipped, since a full pipe would block the engine
            continue
        if not line:
            return
        sys.stderr.write(prefix + line.decode(errors="replace"))


def main() -> None:
    parent, cpus, module = sys.argv[1:4]
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent has already ended
        sys.exit(1)
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    sys.argv[1:4] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
