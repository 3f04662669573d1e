"""Any process may be killed at any time: clients get an error, everything ends within 15 s, nothing is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.serving import SMALL, Engine, chat_body, is_alive, role_of

pytestmark = pytest.mark.faults

DEADLINE_S = 15
NOTICED_S = 10


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def ask_for_long(engine: Engine) -> tuple[list[str], threading.Thread]:
    """Begins a request that would run for minutes: how it ended, once its thread has."""
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
    deadline = time.monotonic() + DEADLINE_S
    while not engine.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline, "no request runs"
        time.sleep(0.05)


@pytest.mark.parametrize("victim", ["api", "worker", "launcher"])  # the others: `test_faults.py`
def test_sigkill(tiny: Path, victim: str) -> None:
    """Red if a death leaves a client waiting, a process, shared memory or a run directory behind, or exits with 0."""
    before = shared_memory()
    engine = Engine(tiny, ["--max-model-len", "8192"], SMALL)
    try:
        outcome, client = ask_for_long(engine)
        target = engine.process.pid if victim == "launcher" else next(pid for pid in engine.children if role_of(pid) == victim)
        killed = time.monotonic()
        os.kill(target, signal.SIGKILL)
        code = engine.process.wait(DEADLINE_S)
        client.join(DEADLINE_S)
        engine.assert_gone(timeout=max(0.1, killed + DEADLINE_S - time.monotonic()))
    finally:
        engine.kill()
    assert code != 0
    assert outcome and outcome[0] != "completed"
    if victim != "api":
        assert outcome[0] == "error", "the api process must answer its clients before it goes"
    assert not any(is_alive(pid) for pid in engine.children)
    assert shared_memory() <= before
    engine.log_path.unlink()


def test_the_launcher_dies_while_the_api_is_stopped(tiny: Path) -> None:
    """Red if the api stays stopped, dies without an error for its clients, or leaves the run directory."""
    engine = Engine(tiny, ["--max-model-len", "8192"], SMALL)
    try:
        outcome, client = ask_for_long(engine)
        os.kill(next(pid for pid in engine.children if role_of(pid) == "api"), signal.SIGSTOP)
        engine.process.kill()
        client.join(DEADLINE_S)
        engine.assert_gone(DEADLINE_S)
    finally:
        engine.kill()
    assert outcome == ["error"]
    engine.log_path.unlink()


def test_several_signals_are_a_clean_stop(tiny: Path) -> None:
    """Red if a stop on purpose exits non-zero or leaves anything when signals of both kinds come at once; `serve` sends one Ctrl-C."""
    before = shared_memory()
    engine = Engine(tiny, [], SMALL)
    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
        engine.process.send_signal(sig)
        time.sleep(0.01)
    assert engine.process.wait(DEADLINE_S) == 0, engine.log()
    engine.assert_gone()
    assert shared_memory() <= before
    engine.log_path.unlink()


def read_stream(engine: Engine, num_tokens: int, ended: list[str]) -> None:
    """Streams a long answer; how it ended."""
    body = chat_body("Hello", max_tokens=num_tokens, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as response:
        lines = [line for line in response.iter_lines() if line]
    ended.append("whole" if lines[-1] == "data: [DONE]" and '"finish_reason":"length"' in lines[-2] else lines[-1])


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_stop_lets_running_requests_end_unless_it_is_asked_twice(tiny: Path, num_signals: int) -> None:
    """Red if SIGTERM cuts a stream, takes new requests meanwhile, looks healthy, or a second one has to wait."""
    engine = Engine(tiny, ["--max-model-len", "8192"], SMALL)
    try:
        ended: list[str] = []
        num_tokens = 300 if num_signals == 1 else 4000
        client = threading.Thread(target=read_stream, args=(engine, num_tokens, ended))
        client.start()
        await_running(engine)
        engine.process.send_signal(signal.SIGTERM)
        while not ended and engine.client.get("/health").status_code != 503:
            time.sleep(0.01)
        if not ended:
            assert engine.chat("Hello").status_code == 503
        if num_signals == 2:
            engine.process.send_signal(signal.SIGTERM)
        assert engine.process.wait(DEADLINE_S) == 0, engine.log()
        client.join(DEADLINE_S)
        engine.assert_gone()
    finally:
        engine.kill()
    assert (ended == ["whole"]) == (num_signals == 1)
    assert "Traceback" not in engine.log()
    engine.log_path.unlink()


@pytest.mark.parametrize("victim", ["worker", "scheduler", "processor"])
def test_a_process_that_is_stopped_is_noticed(tiny: Path, victim: str) -> None:
    """Red if an engine of which a process is stopped looks healthy, also while nobody asks it for anything, or takes requests meanwhile."""
    engine = Engine(tiny, [])
    try:
        stopped = next(pid for pid in engine.children if role_of(pid) == victim)
        assert httpx.get(f"{engine.url}/health").status_code == 200
        os.kill(stopped, signal.SIGSTOP)
        deadline = time.monotonic() + NOTICED_S
        while httpx.get(f"{engine.url}/health").status_code == 200:
            assert time.monotonic() < deadline, "nobody noticed"
            time.sleep(0.2)
        refusal = engine.chat("Hello")
        assert (refusal.status_code, refusal.json()["error"]["code"]) == (503, "stalled")
        os.kill(stopped, signal.SIGCONT)
        deadline = time.monotonic() + DEADLINE_S
        while httpx.get(f"{engine.url}/health").status_code != 200:
            assert time.monotonic() < deadline, "what goes on is not seen to"
            time.sleep(0.2)
        assert engine.chat("Hello").status_code == 200
    finally:
        engine.kill()
    engine.log_path.unlink()


@pytest.mark.parametrize("victim", ["worker", "api"])
def test_a_wedge_ends_the_engine_and_says_where_it_stood(tiny: Path, victim: str) -> None:
    """Red if a supervisor is never given the chance to start it again, if nobody learns where it hung, or if clients wait on."""
    engine = Engine(tiny, ["--wedge-timeout", "2"])
    try:
        outcome, client = ask_for_long(engine)
        stopped = next(pid for pid in engine.children if role_of(pid) == victim)
        os.kill(stopped, signal.SIGSTOP)
        assert engine.process.wait(2 * DEADLINE_S) == 1
        client.join(DEADLINE_S)
        engine.assert_gone()
    finally:
        engine.kill()
    log = engine.log()
    assert "the engine has made no progress for 2 s" in log and f"process {stopped}, is in state T (stopped)" in log
    assert log.count("most recent call first") >= 3, "where the others stood"
    assert outcome and outcome[0] != "completed"
    engine.log_path.unlink()


@pytest.mark.parametrize("has_log", [True, False])
def test_a_full_disk_under_stdout_is_one_line(tiny: Path, tmp_path: Path, has_log: bool) -> None:
    """Red if an engine that cannot say where it listens ends with a traceback, leaves anything, or serves unseen; also without a log."""
    command = [sys.executable, "-m", "engine.serve", "--model", str(tiny), "--port", "0", *SMALL]
    with open("/dev/full", "w") as full:
        log = subprocess.PIPE if has_log else full
        done = subprocess.run(command, stdout=full, stderr=log, text=True, timeout=120, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert done.returncode == 2 and not list(tmp_path.iterdir())
    if has_log:
        assert done.stderr.count("cannot write to stdout: No space left on device") == 1
        assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
