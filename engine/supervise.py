"""The launcher's grip on its children: start them, hear them, notice a death, stop them all. Used by `engine.serve` and `engine.replicas`.

A child's death of any kind becomes one event; the api process is told to stop first, so that it can answer every waiting client.
"""

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.config import child_environment
from engine.ipc import DUMP_SIGNAL, Inbox, Runtime, Status
from models.backends.hopper.toolkit import cuda_home

logger = logging.getLogger(__name__)

API_GRACE_S = 5.0
KILL_GRACE_S = 5.0
MAX_RUN_DIR_BYTES = 107 - len("/worker-1000.sock")  # of the address of a UNIX socket
POLL_S = 0.1
DUMP_S = 0.3


class ChildDied(RuntimeError):
    """A child ended although nobody asked it to."""


@dataclass(frozen=True, slots=True)
class ChildProcess:
    role: str
    process: "subprocess.Popen[bytes]"


class Family:
    """All children of one engine, their run directory (0700, removed at the end) and their lifeline."""

    def __init__(self) -> None:
        """OSError if there is no place for it."""
        self.run_dir = Path(tempfile.mkdtemp(prefix="engine-"))  # mkdtemp makes it 0700
        if len(os.fsencode(self.run_dir)) > MAX_RUN_DIR_BYTES:
            self.run_dir.rmdir()
            most = MAX_RUN_DIR_BYTES - 16  # of which this folder's name takes its part
            raise OSError(f"the path of temporary files is too long for sockets: set TMPDIR to one of {most} bytes at most")
        self.lifeline_fd, self._lifeline_write_fd = os.pipe()
        os.set_inheritable(self.lifeline_fd, True)
        self._inbox: Inbox[Status] = Inbox(str(self.run_dir), "launcher", Status)
        self._children: list[ChildProcess] = []
        self._failures: list[str] = []
        self._well = time.monotonic()  # when the api last said so

    def start(self, role: str, module: str, runtime: Runtime, *arguments: str, fds: tuple[int, ...] = ()) -> None:
        """Starts `python -m module RUNTIME.json arguments`, with the arenas, the lifeline and `fds` as its only inherited descriptors."""
        path = self.run_dir / f"{role}.json"
        path.touch(0o600)
        path.write_bytes(msgspec.json.encode(runtime))
        command = [sys.executable, "-m", module, str(path), *arguments]
        inherited = (*runtime.arena_fds, self.lifeline_fd, *fds)
        home = cuda_home() if runtime.backend == "hopper" else None
        environment = child_environment({} if home is None else {"CUDA_HOME": str(home)})
        group = self._children[0].process.pid if self._children else 0  # one of all children
        self._children.append(ChildProcess(role, subprocess.Popen(command, pass_fds=inherited, env=environment, process_group=group)))

    def wait_ready(self, roles: set[str]) -> dict[str, str]:
        """Logs progress until every role has said that it is ready; their texts. Raises ChildDied."""
        texts: dict[str, str] = {}
        while not roles <= texts.keys():
            status = self._next_status()
            if status is not None and status.state == "ready":
                texts[status.role] = status.text
        self._well = time.monotonic()
        return texts

    def watch(self, patience: float) -> None:
        """Returns never; raises as `check` does."""
        while True:
            self.check(patience)

    def check(self, patience: float) -> None:
        """Takes about 0.1 s. Raises ChildDied when any child has ended, or when the api has not said for `patience` seconds (0: for ever)
        that all is well. Then the log says where every process stands."""
        status = self._next_status()
        if status is not None and status.role == "api":
            self._well = time.monotonic()
        if patience and time.monotonic() - self._well > patience:
            self._dump()
            raise ChildDied(f"the engine has made no progress for {patience:.0f} s")

    def _dump(self) -> None:
        for child in self._children:
            logger.error("%s, process %d, is in state %s", child.role, child.process.pid, _state_of(child.process.pid))
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(DUMP_SIGNAL)
            time.sleep(DUMP_S)  # one after the other

    def drain(self, timeout: float) -> None:
        """Has the api refuse new requests, and waits until the running ones have ended, then it ends itself; or until any child ends."""
        for child in self._children:
            if child.role == "api":
                child.process.send_signal(signal.SIGUSR1)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and all(child.process.poll() is None for child in self._children):
            time.sleep(POLL_S)

    def stop(self) -> None:
        """Ends every child, the api first so that clients get their errors, and removes the run directory."""
        api = [child for child in self._children if child.role == "api"]
        others = [child for child in self._children if child.role != "api"]
        _terminate(api, API_GRACE_S)
        _terminate(others, KILL_GRACE_S)
        self._inbox.close()
        os.close(self._lifeline_write_fd)
        shutil.rmtree(self.run_dir, ignore_errors=True)

    def _next_status(self) -> Status | None:
        """A child's message if one comes soon. Raises ChildDied."""
        status = self._inbox.recv(timeout=POLL_S)
        if status is not None:
            if status.state == "failed":
                self._failures.append(f"{status.role}: {status.text}")
            elif status.text:
                logger.info("%s: %s", status.role, status.text)
            return status
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                reason = "; ".join(self._failures) or f"{child.role} ended with code {code}"
                raise ChildDied(reason)
        return None


def _state_of(pid: int) -> str:
    """As the kernel has it, such as `T (stopped)`."""
    try:
        return Path(f"/proc/{pid}/status").read_text().partition("State:")[2].split("\n")[0].strip()
    except OSError:
        return "gone"


def _terminate(children: list[ChildProcess], grace: float) -> None:
    for child in children:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + grace
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            logger.warning("%s does not stop: killing it", child.role)
            child.process.kill()
            child.process.wait()
