"""When the scheduler says that the engine is alive: what `/health` is made of."""

import random
import time
from pathlib import Path

import pytest

from engine.ipc import Inbox
from engine.messages import Activity, Heartbeat, ToScheduler
from engine.scheduler.liveness import LATE_S, MAX_S, Workers
from engine.worker import heartbeat
from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request

LATER = 1e9


def test_an_idle_engine_is_alive() -> None:
    """Red if an engine without requests looks stalled, however long ago its last step was."""
    sim = Simulation(make_core(), random.Random(0))
    assert sim.core.alive_at(LATER) == LATER
    sim.add(make_request(0, [20], [], 2, ignore_eos=True), [20])
    sim.run()
    assert sim.core.alive_at(LATER) == LATER


def test_a_request_that_nothing_is_planned_for_is_no_progress() -> None:
    """Red if a scheduler that plans nothing, although requests wait, looks healthy for ever."""
    sim = Simulation(make_core(), random.Random(0))
    sim.core.state.free_rows.clear()  # stands in for whatever may be wrong
    before = time.monotonic()
    sim.add(make_request(0, [20], [], 2), [20])
    assert sim.core.next_step() is None
    assert before <= sim.core.alive_at(LATER) <= time.monotonic()
    sim.add(make_request(1, [20], [], 2), [20])
    first = sim.core.alive_at(LATER)
    time.sleep(0.001)
    sim.add(make_request(2, [20], [], 2), [20])
    assert sim.core.alive_at(LATER) == first, "whoever asks again makes it look alive"


def test_a_worker_that_returns_nothing_is_no_progress() -> None:
    """Red if a step that never ends looks like progress."""
    sim = Simulation(make_core(), random.Random(0))
    sim.add(make_request(0, [20], [], 9, ignore_eos=True), [20])
    assert sim.core.next_step() is not None and sim.core.next_step() is not None
    assert sim.core.alive_at(LATER) <= time.monotonic()


def test_waiting_for_the_processor_is_not_the_engines_fault() -> None:
    """Red if a long decode of a file looks like a deadlock, or if what comes after it is not watched."""
    sim = Simulation(make_core(), random.Random(0))
    sim.answers = False
    prompt = [PLACEHOLDER] * 4 + [20]
    sim.add(make_request(0, prompt, [(0, 4, b"a")], 2, files={0}), prompt)
    assert sim.core.next_step() is None
    sim._take()
    assert sim.core.alive_at(LATER) == LATER
    sim.answer(sim.open[0])
    assert sim.core.alive_at(LATER) <= time.monotonic()


def test_a_worker_without_a_beat_is_noticed_at_idle() -> None:
    """Red if an engine whose worker is stopped looks healthy because nobody asks it for anything."""
    workers = Workers("cuda")
    for rank in range(2):
        workers.note(Heartbeat(rank, "idle", 0.0), now=100.0)
    assert workers.alive_at(100.0 + LATE_S, progress=100.0 + LATE_S) == 100.0 + LATE_S
    workers.note(Heartbeat(1, "idle", 0.0), now=110.0)
    assert workers.alive_at(111.0, progress=111.0) == 100.0, "one rank is enough"


@pytest.mark.parametrize(("device", "activity"), [("cuda", "images"), ("cuda", "compiling"), ("cpu", "images"), ("cpu", "step")])
def test_what_takes_long_is_progress_for_a_while(device: str, activity: Activity) -> None:
    """Red if a long decode, or a step on a CPU, looks like a deadlock, or one that never ends does not."""
    workers, most = Workers(device), MAX_S[device][activity]

    def alive_at(now: float, activity: Activity) -> float:
        workers.note(Heartbeat(0, activity, 50.0), now)
        return workers.alive_at(now, progress=50.0)

    assert alive_at(50.0 + most - 1, activity) == 50.0 + most - 1
    assert alive_at(50.0 + most + 1, activity) == 50.0
    if device == "cuda":
        assert alive_at(52.0, "step") == 50.0, "a step that does not end is no progress"


def test_a_worker_beats_whatever_its_main_thread_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if the beat comes from the loop, which an image may hold up, or does not say what that does."""
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    inbox: Inbox[ToScheduler] = Inbox(str(tmp_path), "scheduler", ToScheduler)
    thread = heartbeat.HeartbeatThread(str(tmp_path), rank=3)
    before = time.monotonic()
    thread.note("images")
    beats = [inbox.recv(timeout=5) for _ in range(20)]
    assert all(isinstance(beat, Heartbeat) and beat.rank == 3 for beat in beats)
    last = beats[-1]
    assert isinstance(last, Heartbeat) and last.activity == "images" and before <= last.since <= time.monotonic()
    thread.begin_compiling()
    assert "compiling" in {beat.activity for _ in range(20) if isinstance(beat := inbox.recv(timeout=5), Heartbeat)}
    thread.end_compiling()
    last = next(beat for _ in range(20) if isinstance(beat := inbox.recv(timeout=5), Heartbeat) and beat.activity != "compiling")
    assert last.activity == "images", "a step that made a kernel goes on as what it was"
    thread.stop()
    inbox.close()
