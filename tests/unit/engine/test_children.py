"""Child processes: why a start failed, how they stop, and that they never run files of the working directory."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.launch.process import command_of
from engine.launch.supervise import ChildDied, Supervisor, how_it_ended
from engine.wire.child import Runtime
from engine.wire.config import PACKAGE_ROOT, EngineConfig, child_environment, python_command, server_environment
from engine.wire.guests import GuestPool
from tests.unit.engine.failing_child import REASON


@pytest.fixture
def busy_process() -> Iterator[None]:
    code = "import os; parent = os.getppid(); os.nice(10)\nwhile os.getppid() == parent: pass"  # other tests go on
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def end_of_failing_child() -> str:
    supervisor = Supervisor()
    try:
        runtime = Runtime(
            config=EngineConfig(), backend="torch", device="cpu", run_dir=str(supervisor.run_dir), arena_fds=(0, 0),
            lifeline_fd=supervisor.lifeline_fd, listener_fd=-1, model_folder="", model_names=("test-model",), max_model_len=64,
        )  # fmt: skip
        supervisor.start("worker-0", "tests.unit.engine.failing_child", runtime)
        with pytest.raises(ChildDied) as death:
            supervisor.wait_ready()
        return str(death.value)
    finally:
        supervisor.stop()
        os.close(supervisor.lifeline_fd)


@pytest.mark.parametrize("count", [2, pytest.param(20, marks=pytest.mark.faults)])
def test_reason_of_failed_start_is_reported_every_time(busy_process: None, count: int) -> None:
    """Red if a process ends before its messages are sent, or before the launcher has read them."""
    assert [end_of_failing_child() for _ in range(count)] == [f"worker-0: {REASON}"] * count


def test_signal_that_ended_a_process_is_named() -> None:
    assert how_it_ended(-signal.SIGKILL) == "was killed (SIGKILL, probably out of memory)"
    assert how_it_ended(-signal.SIGSEGV) == "ended by SIGSEGV"
    assert how_it_ended(3) == "ended with code 3"


SIGNALS = """
import signal
from engine.wire.child import StopFlag
flag, count = StopFlag(), 0
def handle(*_):
    global count
    flag.set()
    count += 1
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 5e-5)
while count < 5000:
    pass
signal.setitimer(signal.ITIMER_REAL, 0)
assert flag.is_set()
"""

DOWNLOAD = """
import os, signal, sys, threading
from concurrent.futures import ThreadPoolExecutor
from engine import serve
def download():
    os.kill(os.getpid(), signal.SIGNAL)
    threading.Event().wait()
def make_runtime(config, supervisor, listener_fd):
    print(supervisor.run_dir, flush=True)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(download).result()
serve.make_runtime = make_runtime
sys.exit(serve.main(['--port', '0']))
"""

START = """
import os, signal, sys
from engine import serve
def start_all(supervisor, _):
    os.kill(os.getpid(), signal.SIGNAL)
    print(supervisor.run_dir)
serve.make_runtime, serve.start_all = (lambda *_: None), start_all
sys.exit(serve.main(['--port', '0']))
"""

ORPHAN = """
import os, threading
from types import SimpleNamespace
from engine.wire.child import Child
lifeline, end = os.pipe()
child = object.__new__(Child)
child.runtime = SimpleNamespace(lifeline_fd=lifeline)
child.run_dir = ""
def stop():
    STOP
child.on_orphaned(stop, grace=0.3)
os.close(end)
threading.Event().wait()
"""


def run(script: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stdout.strip()


def test_a_signal_may_interrupt_the_handler_of_another() -> None:
    """PR_SET_PDEATHSIG sends a signal for every thread of the launcher: the flag must have no lock."""
    assert run(SIGNALS)[0] == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("script", [DOWNLOAD, START], ids=["download", "start"])
def test_a_signal_before_the_engine_is_ready(name: str, script: str) -> None:
    """The starts of children are not broken off: `stop` must know each."""
    code, run_dir = run(script.replace("SIGNAL", name))
    assert code == 0
    assert run_dir and not Path(run_dir).exists()


@pytest.mark.parametrize("stop", ["threading.Event().wait()", "raise RuntimeError"])
def test_an_orphan_ends_whatever_its_stop_does(stop: str) -> None:
    assert run(ORPHAN.replace("STOP", stop))[0] == 1


DECOY = "raise SystemExit('a file of the working directory was executed')\n"
NAMES = ("server.py", "engine.py", "queue.py", "json.py", "inspect.py", "models/__init__.py")


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(DECOY)
    return tmp_path


def test_children_ignore_files_of_the_working_directory(decoys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(decoys)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)  # two empty entries: the working directory
    assert end_of_failing_child() == f"worker-0: {REASON}"
    environment = server_environment(EngineConfig())
    command = command_of(frozenset(os.sched_getaffinity(0)), "engine.serve", "--help")
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    async def start() -> None:
        pool = GuestPool(1, "tests.unit.engine.echoing_guest", memory=1 << 32)
        assert await pool.ask(b"a job", 60) == b"a job"
        await pool.close()

    asyncio.run(start())


def test_search_path_keeps_the_user_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/some/library::{PACKAGE_ROOT}")
    for environment in (child_environment(), server_environment(EngineConfig())):
        assert environment["PYTHONPATH"] == f"{PACKAGE_ROOT}{os.pathsep}/some/library"
    assert python_command("engine.serve")[1:] == ["-P", "-m", "engine.serve"]
