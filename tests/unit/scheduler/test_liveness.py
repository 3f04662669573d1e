"""When the scheduler reports that the engine is alive (the source of `/health`), and its checks of itself."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.scheduler import core
from engine.scheduler.liveness import LATE_S, MAX_S, Workers
from engine.scheduler.main import Scheduler
from engine.wire.ipc import Inbox
from engine.wire.messages import Activity, Heartbeat, ToScheduler
from engine.worker import heartbeat
from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core

LATER = 1e9


class Clock(SimpleNamespace):
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(core, "time", clock)
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def test_an_idle_engine_is_alive() -> None:
    sim = Simulation(make_core())
    assert sim.core.alive_at(LATER) == LATER
    sim.ask(0, [20], [], 2, ignore_eos=True)
    sim.run()
    assert sim.core.alive_at(LATER) == LATER


def test_a_request_that_nothing_is_planned_for_is_no_progress(clock: Clock) -> None:
    sim = Simulation(make_core())
    sim.core.state.free_rows.clear()  # stands in for whatever may be wrong
    for rid in range(3):
        sim.ask(rid, [20], [], 2)
        assert sim.core.next_step() is None
        assert sim.core.alive_at(LATER) == 1000
        clock.now += 1


def test_a_worker_that_returns_nothing_is_no_progress(clock: Clock) -> None:
    sim = Simulation(make_core())
    sim.ask(0, [20], [], 9, ignore_eos=True)
    assert sim.core.next_step() is not None and sim.core.next_step() is not None
    assert sim.core.alive_at(LATER) == 1000


def test_waiting_for_the_processor_is_not_the_engines_fault(clock: Clock) -> None:
    sim = Simulation(make_core())
    sim.answers = False
    prompt = [PLACEHOLDER] * 4 + [20]
    sim.ask(0, prompt, [(0, 4, b"a")], 2, files={0})
    assert sim.core.next_step() is None
    sim._take()
    assert sim.core.alive_at(LATER) == LATER
    clock.now += 5
    sim.answer(sim.open[0])
    assert sim.core.alive_at(LATER) == 1005


def test_a_worker_without_a_beat_is_noticed_at_idle() -> None:
    workers = Workers("cuda")
    for rank in range(2):
        workers.note(Heartbeat(rank, "idle", 0.0), now=100.0)
    assert workers.alive_at(100.0 + LATE_S, progress=100.0 + LATE_S) == 100.0 + LATE_S
    workers.note(Heartbeat(1, "idle", 0.0), now=110.0)
    assert workers.alive_at(111.0, progress=111.0) == 100.0, "one rank is enough"


@pytest.mark.parametrize(("device", "activity"), [("cuda", "images"), ("cuda", "compiling"), ("cpu", "images"), ("cpu", "step")])
def test_what_takes_long_is_progress_for_a_while(device: str, activity: Activity) -> None:
    workers, most = Workers(device), MAX_S[device][activity]

    def alive_at(now: float, activity: Activity) -> float:
        workers.note(Heartbeat(0, activity, 50.0), now)
        return workers.alive_at(now, progress=50.0)

    assert alive_at(50.0 + most - 1, activity) == 50.0 + most - 1
    assert alive_at(50.0 + most + 1, activity) == 50.0
    if device == "cuda":
        assert alive_at(52.0, "step") == 50.0, "a step that does not end is no progress"


def test_a_worker_beats_whatever_its_main_thread_does(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL_S", 0.01)
    inbox = Inbox(str(tmp_path), "scheduler", ToScheduler)
    thread = heartbeat.HeartbeatThread(str(tmp_path), rank=3)
    clock.now += 7
    thread.note("images")

    def next_beat_of(activity: Activity) -> Heartbeat:
        """Skip earlier beats: any number of them may wait in the inbox."""
        for _ in range(6000):
            beat = inbox.recv(timeout=60)
            assert isinstance(beat, Heartbeat) and beat.rank == 3
            if beat.activity == activity:
                return beat
        raise AssertionError(f"no beat reports {activity}")

    assert next_beat_of("images").since == 1007
    thread.begin_compiling()
    assert next_beat_of("compiling")
    thread.end_compiling()
    assert next_beat_of("images"), "a step that made a kernel continues as what it was"
    thread.stop()
    inbox.close()


def test_a_leak_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    scheduler, core = Scheduler.__new__(Scheduler), make_core()
    scheduler._leak = 0, 0
    scheduler._log_leak(core)
    core.state.blocks.alloc(2)
    for _ in range(2):
        scheduler._log_leak(core)
    assert [record.getMessage() for record in caplog.records] == ["no request is left, but 2 KV blocks and 0 images are held"]
