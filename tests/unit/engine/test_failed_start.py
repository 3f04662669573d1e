"""A child process that cannot start: its reason reaches the launcher, and its end is described in words."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from engine.config import EngineConfig
from engine.ipc import Runtime
from engine.supervise import ChildDied, Supervisor, how_it_ended
from tests.unit.engine.failing_child import REASON


@pytest.fixture
def busy_process() -> Iterator[None]:
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    yield
    for process in busy:
        process.kill()
        process.wait()


def end_of_failing_child() -> str:
    """What the supervisor reports when its only child fails at once."""
    supervisor = Supervisor()
    try:
        runtime = Runtime(
            config=EngineConfig(), backend="torch", device="cpu", run_dir=str(supervisor.run_dir), arena_fds=(0, 0),
            lifeline_fd=supervisor.lifeline_fd, listener_fd=-1, model_folder="", model_names=("test-model",), max_model_len=64,
        )  # fmt: skip
        supervisor.start("worker-0", "tests.unit.engine.failing_child", runtime)
        with pytest.raises(ChildDied) as death:
            supervisor.wait_ready({"worker-0"})
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
