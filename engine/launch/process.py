"""Servers as child processes. `engine.launch.process PARENT_PID CPU,CPU,... MODULE ARGUMENT...` starts a module that ends with its parent.

A `preexec_fn` could not do the latter: it may wait forever for a lock that another thread of the parent holds."""

import asyncio
import contextlib
import os
import runpy
import signal
import sys

import msgspec

from engine.launch.supervise import ChildDied, how_it_ended
from engine.wire.child import die_with_parent
from engine.wire.config import UNIX_HOST, EngineConfig, python_command, settings_fd, share_environment

KILL_S = 20  # the server waits 10 s for its own processes
PATIENCE_S = 30


def command_of(cpus: frozenset[int], module: str, *arguments: str) -> list[str]:
    """Return a command that uses these CPUs and ends with this process."""
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
    """`python -m engine.serve` on a Unix socket that only this program uses. It ends by `stop`, or with the thread that started it."""

    def __init__(self, config: EngineConfig):
        self._config = msgspec.structs.replace(config, host=UNIX_HOST, ssl_certfile=None, ssl_keyfile=None)
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self.path = ""  # path of the socket
        self.death: str | None = None  # reason why it has ended

    async def start(self) -> None:
        """Wait until the server is ready. Raises ValueError or ChildDied with the server's reason."""
        async with contextlib.AsyncExitStack() as undo:
            undo.push_async_callback(self.stop)
            fd = settings_fd(self._config)
            command = command_of(frozenset(os.sched_getaffinity(0)), "engine.serve", "--config", f"/proc/self/fd/{fd}")
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, pass_fds=(fd,), start_new_session=True,
                    env=share_environment(0, 1, has_gpus=False),
                )  # fmt: skip
            finally:
                os.close(fd)
            assert self._process.stdout is not None
            first = (await self._process.stdout.readline()).decode()
            self._ended = asyncio.create_task(self._watch(self._process, "" if first.startswith(UNIX_HOST) else first))
            if not first.startswith(UNIX_HOST):
                await self._ended
                raise (ValueError if self._process.returncode == 2 else ChildDied)(self.death)
            self.path = first.removeprefix(UNIX_HOST).strip()
            undo.pop_all()

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
        rest, _ = await process.communicate()
        self.death = (output + rest.decode()).strip() or f"the engine {how_it_ended(await process.wait())}"

    async def _end(self) -> None:
        if self._process is not None:
            await end_process(self._process, KILL_S)
        if self._ended is not None:
            await self._ended


def main() -> None:
    parent, cpus, module = sys.argv[1:4]
    die_with_parent(signal.SIGTERM)
    if os.getppid() != int(parent):  # the parent has already ended
        sys.exit(1)
    os.sched_setaffinity(0, map(int, cpus.split(",")))
    sys.argv[1:4] = []
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
