"""One signal to each process and in each phase of a request, once; `python -m bench.faults` has the whole matrix. And many clients that
leave at once."""

import asyncio
import threading
import time
from pathlib import Path

import httpx
import pytest

from bench import faults
from tests.e2e.serving import Engine, chat_body, serve

pytestmark = pytest.mark.faults

CASES = [
    ("api", "upload", "SIGTERM"),
    ("processor", "media", "SIGKILL"),
    ("scheduler", "prefill", "SIGKILL"),
    ("worker", "decode", "SIGTERM"),  # not to be waited for: its answer is a long one
    ("launcher", "decode", "SIGTERM"),
]
NUM_LEAVERS, CLEAN_S = 200, 2.0


@pytest.mark.parametrize(("role", "phase", "name"), CASES)
async def test_a_signal_in_every_phase(role: str, phase: str, name: str) -> None:
    """Red if a client waits for ever, if the engine lives on in part or ends in silence, or if anything of it is left."""
    result = await asyncio.wait_for(faults.case(role, phase, name, pause=11), 240)
    assert result["good"], result


def test_two_hundred_clients_that_leave_at_once(tiny: Path) -> None:
    """Red if what nobody waits for runs on, waits on, or keeps its memory."""

    came: list[int] = []

    def leave(engine: Engine, may_go: threading.Event) -> None:
        body = chat_body("Hello", stream=True, max_tokens=1800, ignore_eos=True)
        with httpx.stream("POST", f"{engine.url}/v1/chat/completions", json=body, timeout=60) as response:
            came.append(response.status_code)
            may_go.wait(60)

    with serve(tiny, "--max-num-seqs", "256") as engine:
        may_go = threading.Event()
        threads = [threading.Thread(target=leave, args=(engine, may_go)) for _ in range(NUM_LEAVERS)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 60
        while len(came) < NUM_LEAVERS:
            assert time.monotonic() < deadline, "not all of them came"
            time.sleep(0.1)
        assert set(came) == {200} and engine.client.get("/load").json()["server_load"] > NUM_LEAVERS // 2
        may_go.set()
        for thread in threads:
            thread.join()
        left = time.monotonic()
        while any(engine.metric(f"engine_{name}") for name in ("num_running", "num_waiting", "open_streams")) or (
            engine.metric("engine_num_free_blocks") < engine.metric("engine_num_blocks")
        ):
            assert time.monotonic() < left + CLEAN_S + 1, "the engine works for nobody"  # its numbers come once a second
            time.sleep(0.1)
        assert engine.text("Still there?")
