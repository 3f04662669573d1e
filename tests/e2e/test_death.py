"""Any process may be killed at any time: clients get an error, everything ends, nothing is left."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import SMALL, Engine, chat_body
from tests.eventually import HANG_GUARD_S, eventually

pytestmark = pytest.mark.faults

def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def ask_for_long(engine: Engine) -> tuple[list[str], threading.Thread]:
    """Begin a request that would run for minutes. Return the list that gets its outcome, and the thread of its client."""
    body = {"messages": [{"role": "user", "content": "go on"}], "max_tokens": 4000, "ignore_eos": True, "stream": True}
    outcome: list[str] = []

    def ask() -> None:
        try:
            with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as response:
                text = "".join(response.iter_text())
            outcome.append("error" if response.status_code >= 400 or '"error"' in text else "completed")
        except httpx.HTTPError:
            outcome.append("broken connection")

    client = threading.Thread(target=ask)
    client.start()
    await_running(engine)
    return outcome, client


def await_running(engine: Engine) -> None:
    eventually(lambda: engine.metric("vllm:num_requests_running"), "a running request")


@pytest.mark.parametrize("victim", ["api", pytest.param("worker", marks=pytest.mark.gate), "launcher"])  # the others: `test_faults.py`
def test_sigkill(tiny: Path, victim: str) -> None:
    """Red if a death leaves a client waiting, or a process, shared memory or a run directory behind, or if the engine exits with 0."""
    before = shared_memory()
    engine = Engine(tiny, ["--max-model-len", "8192"], SMALL)
    try:
        outcome, client = ask_for_long(engine)
        os.kill(engine.process.pid if victim == "launcher" else engine.pid_of(victim), signal.SIGKILL)
        code = engine.process.wait(HANG_GUARD_S)
        client.join()
        engine.assert_gone()
    finally:
        engine.kill()
    assert code != 0
    assert outcome and outcome[0] != "completed"
    if victim != "api":
        assert outcome[0] == "error", "the api process must answer its clients before it ends"
    assert shared_memory() <= before
    engine.log_path.unlink()


def test_the_launcher_dies_while_the_api_is_stopped(tiny: Path) -> None:
    """Red if the api stays stopped, dies without an error for its clients, or leaves the run directory."""
    engine = Engine(tiny, ["--max-model-len", "8192"], SMALL)
    try:
        outcome, client = ask_for_long(engine)
        os.kill(engine.pid_of("api"), signal.SIGSTOP)
        engine.process.kill()
        client.join()
        engine.assert_gone()
    finally:
        engine.kill()
    assert outcome == ["error"]
    engine.log_path.unlink()


def test_several_signals_are_a_clean_stop(tiny: Path) -> None:
    """Red if the engine exits non-zero or leaves anything when signals of both kinds come at once; `serve` sends one Ctrl-C."""
    before = shared_memory()
    engine = Engine(tiny, [], SMALL)
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        engine.process.send_signal(sig)
    assert engine.process.wait(HANG_GUARD_S) == 0, engine.log()
    engine.assert_gone()
    assert shared_memory() <= before
    engine.log_path.unlink()


def read_stream(engine: Engine, num_tokens: int, ended: list[str]) -> None:
    """Stream a long answer and note its end."""
    body = chat_body("Hello", max_tokens=num_tokens, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    ended.append("whole" if lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2] else lines[-1])


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_stop_lets_running_requests_end_unless_it_is_asked_twice(tiny: Path, num_signals: int) -> None:
    """Red if SIGTERM cuts a stream, accepts new requests meanwhile, looks healthy, or if a second one has to wait."""
    engine = Engine(tiny, ["--max-model-len", "8192"], SMALL)
    try:
        ended: list[str] = []
        num_tokens = 300 if num_signals == 1 else 4000
        client = threading.Thread(target=read_stream, args=(engine, num_tokens, ended))
        client.start()
        await_running(engine)
        engine.process.send_signal(signal.SIGTERM)
        eventually(lambda: ended or engine.client.get("/health").status_code == 503, "an unhealthy engine")
        if not ended:
            assert engine.chat("Hello").status_code == 503
        if num_signals == 2:
            engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(HANG_GUARD_S) == 0, engine.log()
        client.join()
        engine.assert_gone()
    finally:
        engine.kill()
    assert (ended == ["whole"]) == (num_signals == 1)
    assert "Traceback" not in engine.log()
    engine.log_path.unlink()


@pytest.mark.parametrize("victim", ["worker", "scheduler", "processor"])
def test_a_process_that_is_stopped_is_noticed(tiny: Path, victim: str) -> None:
    """Red if an engine with a stopped process looks healthy, also while it is idle, or accepts requests meanwhile."""
    engine = Engine(tiny, [])
    try:
        stopped = engine.pid_of(victim)
        assert httpx.get(f"{engine.url}/health").status_code == 200
        os.kill(stopped, signal.SIGSTOP)
        eventually(lambda: httpx.get(f"{engine.url}/health", timeout=HANG_GUARD_S).status_code != 200, "an unhealthy engine")
        refusal = engine.chat("Hello")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "stalled")
        os.kill(stopped, signal.SIGCONT)
        eventually(lambda: httpx.get(f"{engine.url}/health", timeout=HANG_GUARD_S).status_code == 200, "a healthy engine")
        assert engine.chat("Hello").status_code == 200
    finally:
        engine.kill()
    engine.log_path.unlink()


@pytest.mark.parametrize("victim", ["worker", "api"])
def test_a_wedge_ends_the_engine_and_its_log_has_all_stacks(tiny: Path, victim: str) -> None:
    """Red if a supervisor never gets to restart a stalled engine, if the log lacks the stacks of its processes, or if clients wait on."""
    engine = Engine(tiny, ["--wedge-timeout", "2"])
    try:
        outcome, client = ask_for_long(engine)
        stopped = engine.pid_of(victim)
        os.kill(stopped, signal.SIGSTOP)
        assert engine.process.wait(HANG_GUARD_S) == 1
        client.join()
        engine.assert_gone()
    finally:
        engine.kill()
    log = engine.log()
    assert "the engine has made no progress for 2 s" in log and f"process {stopped}, is in state T (stopped)" in log
    assert log.count("most recent call first") >= 3, "the stacks of the others"
    assert outcome and outcome[0] != "completed"
    engine.log_path.unlink()


@pytest.mark.parametrize("has_log", [True, False])
def test_a_full_disk_under_stdout_is_one_line(tiny: Path, tmp_path: Path, has_log: bool) -> None:
    """Red if an engine that cannot write its address ends with a traceback, leaves anything, or serves unseen; also without a log."""
    command = [sys.executable, "-m", "engine.serve", "--model", str(tiny), "--port", "0", *SMALL]
    with open("/dev/full", "w") as full:
        log = subprocess.PIPE if has_log else full
        done = subprocess.run(command, stdout=full, stderr=log, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    if has_log:
        assert done.stderr.count("cannot write to stdout: No space left on device") == 1
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
