"""One signal to each process and in each phase of a request; `python -m bench.faults` has the whole matrix. And many clients that leave at
once."""

import threading
from pathlib import Path

import httpx
import pytest

from bench import faults
from tests.e2e.serving import Engine, chat_body, serve
from tests.eventually import HANG_GUARD_S, eventually

pytestmark = pytest.mark.faults

CASES = [
    ("api", "upload", "SIGTERM"),
    ("processor", "media", "SIGKILL"),
    ("scheduler", "prefill", "SIGKILL"),
    ("worker", "decode", "SIGTERM"),  # not to be waited for: its answer is a long one
    ("launcher", "decode", "SIGTERM"),
]
NUM_LEAVERS = 200


@pytest.mark.parametrize(("role", "phase", "name"), CASES)
async def test_a_signal_in_every_phase(monkeypatch: pytest.MonkeyPatch, role: str, phase: str, name: str) -> None:
    for limit in ("END_S", "CLIENT_S"):
        monkeypatch.setattr(faults, limit, HANG_GUARD_S)
    result = await faults.case(role, phase, name, pause=11)
    assert result["good"], result


def test_two_hundred_clients_that_leave_at_once(tiny: Path) -> None:
    """Red if their requests run on, wait on, or keep memory."""

    came = []

    def leave(engine: Engine, may_go: threading.Event) -> None:
        body = chat_body("Hello", stream=True, max_tokens=1800, ignore_eos=True)
        with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as response:
            came.append(response.status_code)
            may_go.wait(HANG_GUARD_S)

    with serve(tiny, "--max-num-seqs", "256") as engine:
        may_go = threading.Event()
        threads = [threading.Thread(target=leave, args=(engine, may_go)) for _ in range(NUM_LEAVERS)]
        for thread in threads:
            thread.start()
        eventually(lambda: len(came) == NUM_LEAVERS, "the answers to all clients")
        assert set(came) == {200} and engine.client.get("/load").json()["server_load"] > NUM_LEAVERS // 2
        may_go.set()
        for thread in threads:
            thread.join()
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "engine_open_streams"):
            eventually(lambda name=name: not engine.metric(name), f"{name} == 0")
        eventually(lambda: engine.metric("engine_num_free_blocks") == engine.metric("engine_num_blocks"), "the release of all blocks")
        assert engine.text("Still there?")
