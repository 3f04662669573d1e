"""When the engine makes progress (the source of `/health`)."""

from types import SimpleNamespace

import pytest

from engine.scheduler import core
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
