"""Engines started by benchmarks, and the processes of an engine on this machine with their memory."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import engine.serve
from engine.launch.supervise import Supervisor
from engine.wire.child import Runtime

START_S, END_S = 300.0, 15.0
FLAGS = "--no-access-log", "--log-level=warning", "--port=0", "--wedge-timeout=0", "--shutdown-timeout=5"
READY = re.compile(r"ready after .*: (http://\S+) serves")
MODULES = {
    "server.api.main": "api",
    "server.processor.main": "processor",
    "engine.scheduler.main": "scheduler",
    "engine.worker.main": "worker",
}


@contextlib.asynccontextmanager
async def running_engine(
    flags: Sequence[str] = (),
    module: Sequence[str] = ("engine.serve",),
    folder: Path | None = None,
    prefix: Sequence[str] = (),
) -> AsyncIterator[tuple[Process, str]]:
    """Context of a running engine of the clone in `folder` or of this one, whose warnings are shown; yield it and its address."""
    process = await asyncio.create_subprocess_exec(*prefix, sys.executable, "-m", *module, *FLAGS, *flags, stdout=PIPE, cwd=folder)
    assert process.stdout is not None
    children: list[int] = []
    try:
        async with asyncio.timeout(START_S):
            while (match := READY.search((line := await process.stdout.readline()).decode())) is None:
                assert line, "the engine did not start"
        children = list(roles_of(process.pid).values())
        yield process, match[1]
    finally:
        with contextlib.suppress(ProcessLookupError, TimeoutError):  # a killed engine would leave its run directory
            process.terminate()
            await asyncio.wait_for(process.wait(), END_S)
        for pid in {*children, process.pid}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        await process.wait()


def engine_flags(model: str, more: str) -> list[str]:
    """Return flags with a pool of fixed size: free memory cannot be measured while another engine starts."""
    is_stored = model == "demo" or Path(model).is_dir()
    return ["--model", model, *([] if is_stored else ["--load-format", "dummy", "--kv-cache-memory-bytes", "12G"]), *shlex.split(more)]


def serve_with(replaced: str, by: str, settings: Sequence[str], flags: Sequence[str]) -> int:
    """Run `engine.serve` with another module for one of its processes, which gets `settings` after its usual arguments."""

    class Replacing(Supervisor):
        def start(self, role: str, module: str, runtime: Runtime, *arguments: str, fds: tuple[int, ...] = ()) -> None:
            if module == replaced:
                module, arguments = by, (*arguments, *settings)
            super().start(role, module, runtime, *arguments, fds=fds)

    engine.serve.Supervisor = Replacing  # type: ignore[misc]
    return engine.serve.main(list(flags))


def roles_of(launcher: int) -> dict[str, int]:
    """Map roles, or names of other modules, to process ids; of several workers the last one."""
    found = {"launcher": launcher}
    with contextlib.suppress(OSError):  # the launcher has ended
        for pid in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            module = words[words.index(b"-m") + 1].decode() if b"-m" in words else ""
            found[MODULES.get(module, module)] = pid
    return found


def status_of(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; OSError if the process has ended."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def cpu_seconds(launcher: int) -> dict[str, float]:
    found = {}
    for role, pid in roles_of(launcher).items():
        fields = status_of(pid)
        found[role] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return found


def memory_mib(launcher: int | None) -> dict[str, int]:
    """Return the private memory of each role in MiB, without arenas and libraries; empty without a process id."""
    found = {}
    for role, pid in roles_of(launcher).items() if launcher else ():
        with contextlib.suppress(OSError):  # the process has ended
            kib = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
            found[role] = int(kib[1]) >> 10 if kib else 0
    return found
