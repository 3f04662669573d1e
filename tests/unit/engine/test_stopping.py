"""How processes stop: with many signals at once, in the middle of a download, when the launcher is gone and their own end hangs."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

SIGNALS = """
import signal, time
from engine.ipc import StopFlag
flag = StopFlag()
signal.signal(signal.SIGALRM, lambda *_: flag.set())
signal.setitimer(signal.ITIMER_REAL, 1e-4, 5e-5)
end = time.monotonic() + 1
while time.monotonic() < end:
    pass
signal.setitimer(signal.ITIMER_REAL, 0)
assert flag.is_set()
"""

DOWNLOAD = """
import os, signal, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from engine import serve
def make_runtime(config, supervisor, listener_fd):
    print(supervisor.run_dir, flush=True)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGNAL)).start()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 15).result()
serve.make_runtime = make_runtime
sys.exit(serve.main(['--port', '0']))
"""

ORPHAN = """
import os, threading, time
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
time.sleep(15)
"""


def run(script: str) -> tuple[int, str, float]:
    """Exit code, output, seconds."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, timeout=30)
    return done.returncode, done.stdout.strip(), time.monotonic() - started


def test_a_signal_may_interrupt_the_handler_of_another() -> None:
    """Red if the flag has a lock: PR_SET_PDEATHSIG sends a signal for every thread of the launcher, and the second would wait for it."""
    assert run(SIGNALS)[0] == 0


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_download_is_broken_off(name: str) -> None:
    """Red if a signal waits for the download's threads, or leaves the run directory behind."""
    code, run_dir, seconds = run(DOWNLOAD.replace("SIGNAL", name))
    assert code == 0 and seconds < 10
    assert run_dir and not Path(run_dir).exists()


@pytest.mark.parametrize("stop", ["threading.Event().wait()", "raise RuntimeError"])
def test_an_orphan_ends_whatever_its_stop_does(stop: str) -> None:
    """Red if a process can outlive its launcher because its own end hangs or fails."""
    code, _, seconds = run(ORPHAN.replace("STOP", stop))
    assert code == 1 and seconds < 10
