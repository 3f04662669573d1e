"""Supervision of an engine's processes: start, detection of a death, stop."""

import logging
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import msgspec

from engine.wire.child import DUMP_SIGNAL, FAILED, Runtime, Status
from engine.wire.config import child_environment, python_command
from engine.wire.ipc import Inbox
from models.kernels.hopper.toolkit import cuda_home

logger = logging.getLogger(__name__)

GRACE_S = 5.0
MAX_RUN_DIR_BYTES = 107 - len("/worker-1000.sock")  # limit of a UNIX socket's address
POLL_S = 0.1
DUMP_S = 0.3


class ChildDied(RuntimeError):
    """A child ended unexpectedly, or the engine hangs."""


class Supervisor:
    """The children of one engine, their run directory (0700, removed at the end) and their lifeline."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.run_dir = Path(tempfile.mkdtemp(prefix="engine-"))
        if len(os.fsencode(self.run_dir)) > MAX_RUN_DIR_BYTES:
            self.run_dir.rmdir()
            most = MAX_RUN_DIR_BYTES - len("/engine-xxxxxxxx")
            raise OSError(f"the path of temporary files is too long for sockets: set TMPDIR to one of {most} bytes at most")
        self.lifeline_fd, self._lifeline_write_fd = os.pipe()
        os.set_inheritable(self.lifeline_fd, True)
        self._inbox: Inbox[Status] = Inbox(str(self.run_dir), "launcher", Status)
        self._children: dict[str, subprocess.Popen[bytes]] = {}  # by role
        self._well = time.monotonic()  # last report of a healthy api

    def start(self, role: str, module: str, runtime: Runtime, *arguments: str, fds: tuple[int, ...] = ()) -> None:
        """Start a child that inherits the arenas, the lifeline and `fds`."""
        path = self.run_dir / f"{role}.json"
        path.touch(0o600)
        path.write_bytes(msgspec.json.encode(runtime))
        command = python_command(module, str(path), *arguments)
        inherited = (*runtime.arena_fds, self.lifeline_fd, *fds)
        home = cuda_home() if runtime.backend == "hopper" else None
        environment = child_environment({} if home is None else {"CUDA_HOME": str(home)})
        group = next((child.pid for child in self._children.values()), 0)  # one process group for all children
        self._children[role] = subprocess.Popen(command, pass_fds=inherited, env=environment, process_group=group)

    def wait_ready(self) -> str:
        """Return the first report of the api, the last child to be ready. Raises ChildDied."""
        while (status := self._next_status()) is None or status.role != "api":
            pass
        self._well = time.monotonic()
        return status.text

    def check(self, patience: float) -> None:
        """Check for about 0.1 s. Raises ChildDied if a child has ended, or the api was silent for `patience` seconds (0: no limit)."""
        status = self._next_status()
        if status is not None and status.role == "api":
            self._well = time.monotonic()
        if patience and time.monotonic() - self._well > patience:
            self._dump()
            raise ChildDied(f"the engine has made no progress for {patience:.0f} s")

    def _dump(self) -> None:
        for role, child in self._children.items():
            logger.error("stacks of %s, process %d:", role, child.pid)
            child.send_signal(DUMP_SIGNAL)  # no effect if it has ended
            time.sleep(DUMP_S)  # so that the stacks are not interleaved

    def drain(self, timeout: float) -> None:
        """Let the api end after the running requests; wait until any child ends."""
        if "api" in self._children:
            self._children["api"].send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and all(child.poll() is None for child in self._children.values()):
            time.sleep(POLL_S)

    def stop(self) -> None:
        """End every child, the api first so that clients receive their errors, and remove the run directory."""
        self._terminate([role for role in self._children if role == "api"])
        self._terminate([role for role in self._children if role != "api"])
        self._inbox.close()
        os.close(self._lifeline_write_fd)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _next_status(self) -> Status | None:
        status = self._inbox.recv(timeout=POLL_S)
        if status is not None:
            if status.text:
                logger.info("%s: %s", status.role, status.text)
            return status
        for role, child in self._children.items():
            if (code := child.poll()) is not None:
                raise ChildDied("; ".join(self._failures()) or f"{role} {how_it_ended(code)}")
        return None

    def _failures(self) -> list[str]:
        reasons = [(path.stem, path.read_text()) for path in sorted(self.run_dir.glob(f"*{FAILED}"))]
        return [f"{role}: {reason}" for role, reason in reasons if reason]

    def _terminate(self, roles: list[str]) -> None:
        for role in roles:
            self._children[role].terminate()  # no effect if it has ended
        deadline = time.monotonic() + GRACE_S
        for role in roles:
            child = self._children[role]
            try:
                child.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning("%s does not stop: killing it", role)
                child.kill()
                child.wait()


def how_it_ended(code: int) -> str:
    if code == -signal.SIGKILL:
        return "was killed (SIGKILL, probably out of memory)"
    return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
