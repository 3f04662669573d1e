"""A child process's access to the engine: launcher's data and status reports.

The launcher holds the write end of a pipe (the lifeline): its end-of-file tells every child that the launcher died.
"""

import contextlib
import ctypes
import faulthandler
import gc
import logging
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from engine.wire.adapters import AdapterRef
from engine.wire.arena import ArenaView
from engine.wire.config import EngineConfig
from engine.wire.ipc import Outbox
from engine.wire.messages import API_ARENA, PROCESSOR_ARENA
from models.kernels.choose import BackendName, DeviceName

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1
SWITCH_INTERVAL_S = 0.0005  # the main thread gets the interpreter lock back sooner than by default
FAILED = ".failed"
DUMP_SIGNAL = signal.SIGUSR2  # a child writes the stacks of its threads to stderr, even if its interpreter hangs


class Runtime(msgspec.Struct, frozen=True):
    """Data from the launcher for each child, in the JSON file of its first argument."""

    config: EngineConfig
    backend: BackendName
    device: DeviceName
    run_dir: str
    arena_fds: tuple[int, int]
    lifeline_fd: int
    listener_fd: int  # the api's socket: bound, not listening
    model_folder: str
    model_names: tuple[str, ...]  # answers contain the first one
    max_model_len: int
    gpu_decodes_jpegs: bool = False
    adapters: tuple[AdapterRef, ...] = ()
    draft_folder: str = ""  # of --draft-model


class Status(msgspec.Struct, frozen=True):
    role: str
    text: str = ""


class StopFlag:
    """Stop flag for signal handlers. With a threading.Event, a second signal within the first's handler would deadlock."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def is_set(self) -> bool:
        return self._is_set


class Child:
    def __init__(self, role: str, runtime: Runtime):
        self.role = role
        self.runtime = runtime
        self.config = runtime.config
        self.run_dir = runtime.run_dir
        self._status: Outbox[Status] = Outbox(runtime.run_dir, "launcher")

    @classmethod
    def attach(cls, role: str) -> "Child":
        """Attach a child to the engine: set up logging, signals and limits. Call it first."""
        runtime = msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Runtime)
        setup_logging(role, runtime.config.log_level)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # sent with SIGCONT by the kernel if the launcher dies while a process is stopped
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides when to stop
        die_with_parent(signal.SIGTERM)
        raise_file_limit()
        faulthandler.register(DUMP_SIGNAL, all_threads=True)
        return cls(role, runtime)

    def arena_view(self, arena: int) -> ArenaView:
        """Map an arena read-only."""
        return ArenaView(self.runtime.arena_fds[arena], self.arena_size(arena), populate=True)

    def arena_size(self, arena: int) -> int:
        size = {API_ARENA: self.config.api_arena_bytes, PROCESSOR_ARENA: self.config.processor_arena_bytes}[arena]
        assert size is not None, "the launcher decides"
        return size

    def ready(self, text: str = "") -> None:
        settle_heap()
        self._status.send(Status(self.role, text))

    def report_well(self) -> None:
        """Tell the launcher, after `ready`, that the engine makes progress."""
        self._status.send(Status(self.role))

    def failed(self, text: str) -> None:
        """Log why this process ends and write it to a file for the launcher, which is complete at once."""
        logger.error("%s", text)
        with contextlib.suppress(OSError):  # the disk is full: the log has the reason
            Path(self.run_dir, self.role + FAILED).write_text(text)

    def on_orphaned(self, stop: Callable[[], object], grace: float = 5.0) -> None:
        """When the launcher has ended: wake stopped processes of the engine, remove the run directory, call `stop` (from a thread), and end
        this process `grace` seconds later."""

        def watch() -> None:
            os.read(self.runtime.lifeline_fd, 1)
            os.killpg(0, signal.SIGCONT)
            shutil.rmtree(self.run_dir, ignore_errors=True)
            timer = threading.Timer(grace, os._exit, (1,))  # even if `stop` hangs
            timer.daemon = True
            timer.start()
            with contextlib.suppress(RuntimeError):  # its event loop has ended already
                stop()

        threading.Thread(target=watch, name="lifeline", daemon=True).start()


def settle_heap() -> None:
    """Freeze existing objects, so that the garbage collector skips them: a full collection takes 30 to 120 ms."""
    gc.collect()
    gc.freeze()
    gc.collect()  # finds nothing; its result makes later full collections rarer


def keep_freed_blocks() -> None:
    """Make malloc reuse freed blocks of up to 16 MiB: a new block costs page faults, which take longer than copying into it."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 24)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 25)


def map_large_blocks() -> None:
    """Make malloc return freed blocks of 256 KiB or more, whose heap would become fragmented. For processes with few of them: each costs
    page faults."""
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 18)


def die_with_parent(sig: signal.Signals) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(sig))


def raise_file_limit() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def setup_logging(role: str, level: str) -> None:
    logging.basicConfig(level=level.upper(), format=f"%(asctime)s {role:<10} %(levelname)-7s %(message)s", datefmt="%H:%M:%S", force=True)
