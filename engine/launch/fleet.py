"""`--dp N`: N engines on one host behind the affinity proxy, each with its share of GPUs, CPUs and memory.

    launcher (this) ──▶ python -m server.proxy                     --host, --port
             │     └──▶ python -m engine.serve --config MEMFD      127.0.0.1, --port + 1     its CPUs, GPUs 0 .. tp-1
             └────────▶ python -m engine.serve --config MEMFD      127.0.0.1, --port + 2     the next ones

An engine that ends is restarted. All ends when an engine does not start at first, when none is left, or when the proxy ends.
"""

import asyncio
import contextlib
import logging
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.launch.process import command_of, end_process
from engine.launch.supervise import how_it_ended
from engine.wire.config import EngineConfig, child_environment, read_api_keys, settings_fd, share_environment
from models.kernels.choose import Gpu

logger = logging.getLogger(__name__)

READY = re.compile(r"ready after .* serves (.+)")
OF_THE_PROXY = ("host", "port", "ssl_certfile", "ssl_keyfile", "dp")  # fields for the proxy instead of the engines
OF_BOTH = ("max_connections", "idle_timeout", "ssl_certfile", "ssl_keyfile")
MIN_PAUSE_S, MAX_PAUSE_S = 1, 60  # before an engine is restarted; doubled if it had not become ready
KILL_GRACE_S = 20  # after --shutdown-timeout; an engine waits 10 s for its processes
POLL_S = 0.05
CPUS = Path("/sys/devices/system/cpu")
GONE_S = 5  # wait for the last log lines of a dead engine
MAX_LINE = 1 << 20  # characters of a log line


class Ended(Exception):
    """Ends the fleet; `code` is the launcher's exit code."""

    def __init__(self, code: int, reason: str = ""):
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class Member:
    index: int
    url: str
    config_fd: int  # a memfd, so that no file contains keys
    cpus: frozenset[int]
    environment: dict[str, str]


class Fleet:
    """Several engines and their proxy. `config` has each engine's share of the memory; `listener` is the proxy's bound socket."""

    def __init__(self, config: EngineConfig, listener: socket.socket):
        self._config, self._listener = config, listener
        self._started = time.monotonic()
        self._engines: set[asyncio.subprocess.Process] = set()
        self._ready: dict[int, str] = {}  # engines that serve -> the name of their model
        self._all_ready = asyncio.Event()  # every engine has been ready once
        self._stop = asyncio.Event()

    async def serve(self, gpus: Sequence[Gpu]) -> int:
        """Return the exit code. Raises ValueError or OSError."""
        config = self._config
        if gpus and len(gpus) < (needed := config.dp * config.tp):
            raise ValueError(f"--dp {config.dp} with --tp {config.tp} needs {needed} GPUs; this machine has {len(gpus)}")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        members = divide(config, self._listener.getsockname()[1], bool(gpus))
        try:
            async with asyncio.TaskGroup() as group:
                for task in (self._end_when_stopped(), self._route(members), *(self._keep(member) for member in members)):
                    group.create_task(task)
        except* Ended as ends:
            end = ends.exceptions[0]
        assert isinstance(end, Ended)
        if end.code:
            logger.error("%s", end)
        return end.code

    def _interrupt(self) -> None:
        """Stop; the second call ends the engines' wait for running requests."""
        if self._stop.is_set():
            for process in self._engines:
                with contextlib.suppress(ProcessLookupError):  # it has ended, but its output is still open
                    process.send_signal(signal.SIGTERM)
        self._stop.set()

    async def _end_when_stopped(self) -> None:
        await self._stop.wait()
        logger.info("stopping: running requests have %d s to finish; a second signal stops immediately", self._config.shutdown_timeout)
        raise Ended(0)

    async def _keep(self, member: Member) -> None:
        pause = MIN_PAUSE_S
        while True:
            async with self._engine(member) as (process, output):
                code = await process.wait()
                was_ready = self._ready.pop(member.index, None) is not None
                if not self._all_ready.is_set():
                    raise Ended(code or 1, f"engine {member.index} did not start: it {how_it_ended(code)}")
                if not self._ready:
                    raise Ended(1, f"engine {member.index} {how_it_ended(code)}, and no other is left")
                pause = MIN_PAUSE_S if was_ready else min(2 * pause, MAX_PAUSE_S)
                text = "engine %d %s: %d of %d are still serving; restarting it in %d s"
                logger.error(text, member.index, how_it_ended(code), len(self._ready), self._config.dp, pause)
                await output  # wait for its other processes, which hold the GPU and the port
            await asyncio.sleep(pause)

    @contextlib.asynccontextmanager
    async def _engine(self, member: Member) -> AsyncIterator[tuple[asyncio.subprocess.Process, "asyncio.Task[None]"]]:
        """Context of an engine and the task that copies its output, which ends with the engine's last process. On exit it is stopped."""
        command = command_of(member.cpus, "engine.serve", "--config", f"/proc/self/fd/{member.config_fd}")
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdout=pipe, stderr=pipe, limit=MAX_LINE, env=member.environment, pass_fds=(member.config_fd,), process_group=0
        )
        assert process.stdout is not None and process.stderr is not None
        self._engines.add(process)
        log = asyncio.create_task(_copy(process.stderr, f"engine-{member.index} "))
        output = asyncio.create_task(self._listen(member.index, process.stdout))
        try:
            yield process, output
        finally:
            await end_process(process, self._config.shutdown_timeout + KILL_GRACE_S)
            self._engines.discard(process)
            _, left = await asyncio.wait((log, output), timeout=GONE_S)
            for task in left:
                task.cancel()

    async def _listen(self, index: int, output: asyncio.StreamReader) -> None:
        async for line in output:
            if found := READY.search(line.decode()):
                self._ready[index] = found[1]
                if self._all_ready.is_set():
                    logger.info("engine %d is serving again", index)
                elif len(self._ready) == self._config.dp:
                    self._all_ready.set()

    async def _route(self, members: Sequence[Member]) -> None:
        """Run the proxy when every engine is ready; it is the last process to end."""
        await self._all_ready.wait()
        config, fd = self._config, self._listener.fileno()
        cpus, urls = frozenset(os.sched_getaffinity(0)), (member.url for member in members)
        command = command_of(cpus, "server.proxy", "--fd", str(fd), "--backends", *urls)
        for name, value in msgspec.structs.asdict(config).items():
            command += ["--" + name.replace("_", "-"), str(value)] if name in OF_BOTH and value else []
        keys = os.memfd_create("keys", 0)  # keeps the keys out of files and process lists
        if api_keys := read_api_keys(config):
            os.write(keys, "\n".join(api_keys).encode())
            command += ["--api-key-file", f"/proc/self/fd/{keys}"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=child_environment(), pass_fds=(fd, keys), process_group=0
        )
        os.close(keys)
        self._listener.close()  # so that the port closes with the proxy
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                seconds = time.monotonic() - self._started
                url = line.split()[2].decode()
                print(f"ready after {seconds:.1f} s: {url} serves {self._ready[0]}, by {config.dp} engines", flush=True)
            code = await process.wait()
        except asyncio.CancelledError:
            while self._engines:
                await asyncio.sleep(POLL_S)
            await end_process(process, KILL_GRACE_S)
            raise
        raise Ended(1, f"the proxy {how_it_ended(code)}")


def divide(config: EngineConfig, port: int, has_gpus: bool) -> list[Member]:
    """Return the engines, each with an equal share. Their ports follow the proxy's `port`; with --port 0 they are arbitrary."""
    ports = range(port + 1, port + 1 + config.dp) if config.port else _free_ports(config.dp)
    defaults = EngineConfig()
    own = msgspec.structs.replace(config, **{name: getattr(defaults, name) for name in OF_THE_PROXY})
    cpus = _neighbouring_cpus()
    members = []
    for index, own_port in enumerate(ports):
        fd = settings_fd(msgspec.structs.replace(own, port=own_port))
        share = cpus[index * len(cpus) // config.dp : (index + 1) * len(cpus) // config.dp]
        environment = share_environment(index, config.tp, has_gpus)
        members.append(Member(index, f"http://127.0.0.1:{own_port}", fd, frozenset(share or cpus), environment))
    return members


def _neighbouring_cpus() -> list[int]:
    def place(cpu: int) -> tuple[int, int, int]:
        topology = CPUS / f"cpu{cpu}" / "topology"
        try:
            return int((topology / "physical_package_id").read_text()), int((topology / "core_id").read_text()), cpu
        except OSError:
            return 0, 0, cpu

    return sorted(os.sched_getaffinity(0), key=place)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in bound]


async def _copy(log: asyncio.StreamReader, prefix: str) -> None:
    while True:
        try:
            line = await log.readline()
        except ValueError:  # longer than MAX_LINE: skipped, since a full pipe would block the engine
            continue
        if not line:
            return
        sys.stderr.write(prefix + line.decode(errors="replace"))
