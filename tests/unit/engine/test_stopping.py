"""How processes stop: on many signals at once, during a download, and after the launcher's death when their own stop hangs or fails."""

import subprocess
import sys
from pathlib import Path

import pytest

SIGNALS = """
import signal
from engine.ipc import StopFlag
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

ORPHAN = """
import os, threading
from types import SimpleNamespace
from engine.ipc import Child
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
    """Exit code and output. A script that hangs fails the test."""
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    return done.returncode, done.stdout.strip()


def test_a_signal_may_interrupt_the_handler_of_another() -> None:
    """PR_SET_PDEATHSIG sends a signal for every thread of the launcher: the flag must have no lock."""
    assert run(SIGNALS)[0] == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_download_is_broken_off(name: str) -> None:
    """No run directory is left."""
    code, run_dir = run(DOWNLOAD.replace("SIGNAL", name))
    assert code == 0
    assert run_dir and not Path(run_dir).exists()


@pytest.mark.parametrize("stop", ["threading.Event().wait()", "raise RuntimeError"])
def test_an_orphan_ends_whatever_its_stop_does(stop: str) -> None:
    assert run(ORPHAN.replace("STOP", stop))[0] == 1
