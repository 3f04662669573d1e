"""An engine whose api is the caller's process and event loop, without an HTTP server: for `engine.llm` and `engine.launch.replicas`.

caller: Api ──▶ processor ──▶ scheduler ──▶ workers, its children
"""

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine
from typing import Any

from engine.launch.child import Child
from engine.launch.config import EngineConfig
from engine.launch.supervise import ChildDied, Supervisor
from engine.serve import make_runtime, size_arenas, start_engine
from engine.wire.arena import memory_limit
from engine.wire.ipc import AsyncInbox
from engine.wire.messages import Events
from server.http.app import SHUTTING_DOWN, Api
from server.warm import warm_up

logger = logging.getLogger(__name__)


class HostedEngine:
    """Belongs to the event loop, and to the thread, in which it was started: its children end when that thread does."""

    api: Api

    def __init__(self, config: EngineConfig, owns_process: bool = False):
        """Raises OSError."""
        self._config, self._owns_process = config, owns_process
        self._supervisor = Supervisor()
        self._is_stopping = threading.Event()
        self._stopping: asyncio.Task[None] | None = None
        self._in_thread: asyncio.Future[object] | None = None  # whoever waits for the children
        self._tasks: list[asyncio.Task[None]] = []
        self._undo = contextlib.ExitStack()
        self.death: str | None = None  # why it serves no more

    async def start(self, num_neighbours: int = 1) -> None:
        """Returns when the engine is ready; `num_neighbours` share the memory of the machine. Raises ValueError, OSError or ChildDied, and
        then nothing of it is left."""
        try:
            sized = size_arenas(self._config, memory_limit() // num_neighbours)
            runtime = await asyncio.to_thread(make_runtime, sized, self._supervisor, -1)
            for fd in runtime.arena_fds:
                self._undo.callback(os.close, fd)
            start_engine(self._supervisor, runtime)
            child = Child("api", runtime, owns_process=self._owns_process)
            inbox: AsyncInbox[Events] = AsyncInbox(child.run_dir, "api", Events)
            self._undo.callback(child.close)
            self._undo.callback(inbox.close)
            self.api = Api(child)
            warm_up(self.api.arena)
            self._tasks = [asyncio.create_task(self.api.pump(inbox, "here")), asyncio.create_task(self.api.tell_the_launcher())]
            roles = {"processor", "scheduler", "api"}
            await self._wait_in_thread(asyncio.to_thread(self._supervisor.wait_ready, roles, self._is_stopping.is_set))
        except BaseException:
            await self.stop()
            raise
        self._tasks.append(asyncio.create_task(self._watch()))

    async def stop(self) -> None:
        """End every process; every caller waits until all have ended. Cancelling a caller interrupts nothing. Requests get an error."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._end_processes())
        await asyncio.shield(self._stopping)

    async def _end_processes(self) -> None:
        self._is_stopping.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, *([self._in_thread] if self._in_thread else []), return_exceptions=True)
        try:
            await asyncio.to_thread(self._supervisor.stop)
        except RuntimeError:  # the interpreter ends, and has no threads any more
            self._supervisor.stop()
        if hasattr(self, "api"):
            self.api.client.refuse_all(SHUTTING_DOWN)
        self._undo.close()

    async def _wait_in_thread(self, waiting: Coroutine[Any, Any, object]) -> None:
        """Goes on in its thread if it is cancelled; `stop` waits for that."""
        self._in_thread = asyncio.ensure_future(waiting)
        await asyncio.shield(self._in_thread)

    async def _watch(self) -> None:
        try:
            while not self._tasks[0].done():
                await self._wait_in_thread(asyncio.to_thread(self._supervisor.check, self._config.wedge_timeout))
            self.death = f"the api ended: {self._tasks[0].exception()}"
        except ChildDied as death:
            self.death = str(death)
        logger.error("%s", self.death)
        self.api.client.refuse_all(SHUTTING_DOWN)
