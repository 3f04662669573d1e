"""The api and the processor of a `Stack`: as two processes, or in a thread of the test process."""

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import uvloop

from engine.wire.child import Child, Runtime, Status
from engine.wire.ipc import AsyncInbox
from engine.wire.messages import Events
from server.api.http.connection import BACKLOG, make_server, url_of
from server.api.main import Api
from server.processor.main import Processor
from tests.eventually import HANG_GUARD_S

MODULES = {"processor": "server.processor.main", "api": "server.api.main"}


class Processes:
    """Two processes, started as the launcher starts them. `inherited` are file descriptors that they take over."""

    def __init__(self, runtime: Runtime, inherited: tuple[int, ...]):
        file = Path(runtime.run_dir, "runtime.json")
        file.write_bytes(msgspec.json.encode(runtime))
        self.by_role = {
            role: subprocess.Popen([sys.executable, "-m", module, str(file)], cwd=Path(__file__).parents[3], pass_fds=inherited)
            for role, module in MODULES.items()
        }

    def check(self) -> None:
        ended = {role: process.returncode for role, process in self.by_role.items() if process.poll() is not None}
        assert not ended, f"ended with {ended}"

    def close(self) -> None:
        for process in self.by_role.values():
            process.terminate()
        for process in self.by_role.values():
            process.wait(timeout=HANG_GUARD_S)


class ThreadChild(Child):
    def ready(self, text: str = "") -> None:
        self._status.send(Status(self.role, text))


class InProcess:
    """The same objects and the same HTTP server in an event loop of one thread: it starts in a tenth of a second of CPU time.

    Helper processes start with their first question. There are no signals and no lifeline.
    """

    loop: asyncio.AbstractEventLoop
    api: Api
    processor: Processor

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._listener = socket.socket(fileno=os.dup(runtime.listener_fd))
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="servers", daemon=True)
        self._thread.start()

    def check(self) -> None:
        if self._problem is not None:
            raise AssertionError("a server failed") from self._problem
        assert self._thread.is_alive(), "the servers ended"

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended with a failure
            self.loop.call_soon_threadsafe(self._stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self.loop = runner.get_loop()
                runner.run(self._serve())
        except BaseException as problem:
            self._problem = problem

    async def _serve(self) -> None:
        config, run_dir = self._runtime.config, self._runtime.run_dir
        children = {role: ThreadChild(role, self._runtime) for role in MODULES}
        inbox: AsyncInbox[Events] = AsyncInbox(run_dir, "api", Events)
        self._listener.listen(BACKLOG)
        self.api = Api(children["api"])
        server = make_server(self.api.build(), config.max_connections, config, 1)
        async with asyncio.TaskGroup() as tasks:
            processor = self.processor = Processor(children["processor"], tasks)
            processor._intake.start = lambda: None  # type: ignore[method-assign]  # helpers start when they are needed
            children["processor"].ready()
            serving = [
                tasks.create_task(self.api.pump(inbox, url_of(self._listener))),
                tasks.create_task(processor.run()),
            ]

            def stop() -> None:
                server.should_exit = server.force_exit = True
                for task in serving:
                    task.cancel()

            self._stop = stop
            await server.listen(self._listener)
        inbox.close()
        for child in children.values():
            child._status.close()
