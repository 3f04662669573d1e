"""Any process may be killed or stopped at any time, on any machine: clients get an error, everything ends, nothing is left."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import LongAnswer, doomed, image_part, picture, role_of
from tests.eventually import HANG_GUARD_S, eventually

pytestmark = pytest.mark.faults
LONG = ("--max-model-len", "8192")


@pytest.mark.parametrize("victim", ["api", "processor", "scheduler", pytest.param("worker", marks=pytest.mark.gate), "launcher"])
def test_sigkill(tiny: Path, victim: str) -> None:
    before = set(os.listdir("/dev/shm"))
    with doomed(tiny, *LONG) as engine:
        answer = LongAnswer(engine.url)
        os.kill(engine.process.pid if victim == "launcher" else engine.pid_of(victim), signal.SIGKILL)
        assert engine.process.wait(HANG_GUARD_S) != 0
        outcome = answer.join()
        engine.assert_gone()
    assert outcome == "error" or (victim == "api" and outcome == "broken")
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_stop_lets_running_requests_end_unless_it_is_asked_twice(tiny: Path, num_signals: int) -> None:
    with doomed(tiny, *LONG) as engine:
        answer = LongAnswer(engine.url, num_tokens=300 if num_signals == 1 else 4000)
        engine.process.send_signal(signal.SIGTERM)
        eventually(lambda: answer.outcome or engine.client.get("/health").status_code == 503, "an unhealthy engine")
        if not answer.outcome:
            assert engine.chat("Hello").status_code == 503
        if num_signals == 2:
            engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(HANG_GUARD_S) == 0
        outcome = answer.join()
        engine.assert_gone()
        assert (outcome == "whole") == (num_signals == 1) and "Traceback" not in engine.log()


@pytest.mark.parametrize("victim", ["scheduler", "processor"])
def test_a_process_that_is_stopped_is_noticed(tiny: Path, victim: str) -> None:
    with doomed(tiny) as engine:

        def is_healthy() -> bool:
            return httpx.get(f"{engine.url}/health", timeout=HANG_GUARD_S).status_code == 200

        stopped = engine.pid_of(victim)
        assert is_healthy()
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: not is_healthy(), "an unhealthy engine")
        refusal = engine.chat("Hello")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "stalled")
        os.kill(stopped, signal.SIGCONT)
        eventually(is_healthy, "a healthy engine")
        assert engine.chat("Hello").status_code == 200


@pytest.mark.parametrize("victim", ["worker", "api"])
def test_a_wedge_ends_the_engine_and_its_log_has_all_stacks(tiny: Path, victim: str) -> None:
    with doomed(tiny, "--wedge-timeout", "2") as engine:
        answer = LongAnswer(engine.url)
        stopped = engine.pid_of(victim)
        os.kill(stopped, signal.SIGSTOP)
        assert engine.process.wait(HANG_GUARD_S) == 1
        outcome = answer.join()
        engine.assert_gone()
        log = engine.log()
    assert "the engine has made no progress for 2 s" in log and f"process {stopped}:" in log
    assert log.count("most recent call first") >= 3, "the stacks of the others"
    assert outcome in ("error", "broken")


ALONE = ["unshare", "--map-root-user", "--mount"]  # mounts that only the engine sees
MOUNTS = 'mount -t tmpfs -o size=64k none /dev/shm && mount -t tmpfs -o size=4m none "$0" && export TMPDIR="$0" && exec "$@"'
NOBODY = 65534


def test_little_shared_memory_and_a_disk_that_fills(tiny: Path, tmp_path: Path) -> None:
    if subprocess.run([*ALONE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs mounts of its own")
    with doomed(tiny, prefix=[*ALONE, "sh", "-c", MOUNTS, str(tmp_path)]) as engine:
        folder = Path(f"/proc/{engine.process.pid}/root{tmp_path}")
        assert engine.run_dir.is_relative_to(tmp_path) and any(folder.iterdir())
        with pytest.raises(OSError), open(folder / "others", "wb", buffering=0) as others:
            while True:
                others.write(bytes(1 << 16))
        assert os.statvfs(folder).f_bavail == 0
        assert engine.text("Go on") and engine.text([image_part(picture(1, 64, 64))])
        assert engine.chat("Yes or no?", response_format={"type": "json_object"}).status_code == 200
        assert engine.client.post("/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 4}).status_code == 200
        engine.stop()


def test_other_users_see_nothing(tiny: Path) -> None:
    with doomed(tiny, "--api-key", "sekret") as engine:
        assert stat.S_IMODE(engine.run_dir.stat().st_mode) == 0o700
        if os.getuid() == 0:
            code = f"import os, sys; os.setgid({NOBODY}); os.setuid({NOBODY}); os.listdir(sys.argv[1])"
            done = subprocess.run([sys.executable, "-c", code, str(engine.run_dir)], capture_output=True, text=True, check=False)
            assert "PermissionError" in done.stderr
        for child in engine.children:
            assert b"sekret" not in Path(f"/proc/{child}/cmdline").read_bytes(), role_of(child)
        assert engine.client.post("/tokenize", json={"prompt": "a"}, headers={"x-api-key": "sekret"}).status_code == 200
        engine.stop()
