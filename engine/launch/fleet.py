"""`--dp N`: N engines on one host behind the affinity proxy, each with its share of GPUs, CPUs and memory.

    launcher (this) ──▶ python -m server.proxy     --host, --port
             │     └──▶ python -m engine.serve     127.0.0.1, --port + 1     its CPUs, GPUs 0 .. tp-1
             └────────▶ python -m engine.serve     127.0.0.1, --port + 2     the next ones

An engine that ends is restarted. All end if an engine does not start at first, if none is left, or with the proxy.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.launch.process import ServerProcess, command_of, end_process
from engine.launch.supervise import ChildDied, how_it_ended
from engine.wire.config import EngineConfig, server_environment
from models.kernels.choose import Gpu

logger = logging.getLogger(__name__)

RESTART_S = 5.0
PROXY_GRACE_S = 20
POLL_S = 0.05
CPUS = Path("/sys/devices/system/cpu")


End = tuple[int, str]  # exit code of the launcher, and its reason


class Fleet:
    """Several engines and their proxy. `config` has each engine's share of the memory; `listener` is the proxy's bound socket."""

    def __init__(self, config: EngineConfig, listener: socket.socket):
        self._config, self._listener = config, listener
        self._started = time.monotonic()
        self._servers: dict[int, ServerProcess] = {}
        self._ready: set[int] = set()  # engines that serve
        self._all_ready = asyncio.Event()  # every engine has been ready once
        self._stop = asyncio.Event()

    async def serve(self, gpus: Sequence[Gpu]) -> int:
        """Return the exit code. Raises ValueError or OSError."""
        config = self._config
        if gpus and len(gpus) < (needed := config.dp * config.tp):
            raise ValueError(f"--dp {config.dp} with --tp {config.tp} needs {needed} GPUs; this machine has {len(gpus)}")
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        port = self._listener.getsockname()[1]
        ports = list(range(port + 1, port + 1 + config.dp)) if config.port else _free_ports(config.dp)
        keeping = (self._keep(index, own, cpus, bool(gpus)) for index, (own, cpus) in enumerate(divide(config, ports)))
        tasks = [asyncio.create_task(task) for task in (self._end_when_stopped(), self._route(ports), *keeping)]
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        code, reason = done.pop().result()
        if code:
            logger.error("%s", reason)
        return code

    def _interrupt(self) -> None:
        """Stop; the second call ends this process, and its end is the engines' second signal."""
        if self._stop.is_set():
            os._exit(0)
        self._stop.set()

    async def _end_when_stopped(self) -> End:
        await self._stop.wait()
        logger.info("stopping: running requests have %d s to finish; a second signal stops immediately", self._config.shutdown_timeout)
        return 0, ""

    async def _keep(self, index: int, config: EngineConfig, cpus: list[int], has_gpus: bool) -> End:
        while True:
            server = self._servers[index] = ServerProcess(config, cpus, index if has_gpus else None, index)
            try:
                with contextlib.suppress(ValueError, ChildDied):
                    await server.start()
                    self._ready.add(index)
                    if self._all_ready.is_set():
                        logger.info("engine %d is serving again", index)
                    elif len(self._ready) == self._config.dp:
                        self._all_ready.set()
                    await server.wait()
            finally:
                await server.stop()
                del self._servers[index]
            self._ready.discard(index)
            if not self._all_ready.is_set():
                return server.code, f"engine {index} did not start: {server.death}"
            if not self._ready:
                return 1, f"engine {index}: {server.death}, and no other is left"
            logger.error("engine %d: %s; restarting it in %d s", index, server.death, RESTART_S)
            await asyncio.sleep(RESTART_S)

    async def _route(self, ports: Sequence[int]) -> End:
        """Run the proxy when every engine is ready; it is the last process to end."""
        await self._all_ready.wait()
        fd, name = self._listener.fileno(), self._servers[0].ready.rpartition(" serves ")[2]
        urls = (f"http://127.0.0.1:{port}" for port in ports)
        command = command_of((), "server.proxy", "--fd", str(fd), "--backends", *urls)
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, env=server_environment(self._config), pass_fds=(fd,), process_group=0
        )
        self._listener.close()  # so that the port closes with the proxy
        assert process.stdout is not None
        try:
            async for line in process.stdout:
                seconds, url = time.monotonic() - self._started, line.split()[2].decode()
                print(f"ready after {seconds:.1f} s: {url} serves {name}, by {self._config.dp} engines", flush=True)
            code = await process.wait()
        except asyncio.CancelledError:
            while self._servers:
                await asyncio.sleep(POLL_S)
            await end_process(process, PROXY_GRACE_S)
            raise
        return 1, f"the proxy {how_it_ended(code)}"


def divide(config: EngineConfig, ports: Sequence[int]) -> list[tuple[EngineConfig, list[int]]]:
    """Return the settings and the CPUs of each engine."""
    cpus, host = sorted(os.sched_getaffinity(0), key=_place_of), EngineConfig().host
    bounds = [index * len(cpus) // len(ports) for index in range(len(ports) + 1)]
    shares = (cpus[start:end] or cpus for start, end in itertools.pairwise(bounds))
    return [(msgspec.structs.replace(config, host=host, port=port, dp=1), share) for port, share in zip(ports, shares, strict=True)]


def _place_of(cpu: int) -> list[int]:
    files = (CPUS / f"cpu{cpu}" / "topology" / name for name in ("physical_package_id", "core_id"))
    try:
        return [*(int(file.read_text()) for file in files), cpu]
    except OSError:
        return [0, 0, cpu]


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as sockets:
        bound = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in bound]
