"""How children stop: with many signals at once, as when a launcher of many threads is gone."""

import subprocess
import sys

SCRIPT = """
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


def test_a_signal_may_interrupt_the_handler_of_another() -> None:
    """Red if the flag has a lock: PR_SET_PDEATHSIG sends a signal for every thread of the launcher, and the second would wait for it."""
    subprocess.run([sys.executable, "-c", SCRIPT], check=True, timeout=30)
