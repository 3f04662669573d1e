"""Deadlines of requests."""

from types import SimpleNamespace

import msgspec
import pytest

from engine.scheduler import core
from engine.scheduler.core import SchedulerCore
from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request

PROMPT = [20] * 6
NOW = 1000.0


@pytest.fixture(autouse=True)
def _stopped_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core, "time", SimpleNamespace(monotonic=lambda: NOW))


def simulation(**limits: object) -> Simulation:
    made = make_core(num_blocks=64, **limits)
    return Simulation(SchedulerCore(made.state, 1, 10_000, frozenset()))


def ask(sim: Simulation, rid: int, deadline: float | None = None, n: int = 1) -> None:
    wire = make_request(rid, PROMPT, [], 30, ignore_eos=True)
    sim.add(msgspec.structs.replace(wire, deadline=deadline, n=n), PROMPT)


def error_of(sim: Simulation, now: float) -> list[tuple[int, int, int]]:
    sim.core.expire(now)
    errors = [(output.rid, output.index, output.error.status) for output in sim.core._outputs if output.error is not None]
    sim._take()
    return errors


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_a_deadline_ends_a_request_waiting_or_running(num_steps: int) -> None:
    sim = simulation()
    ask(sim, 0, NOW + 100, n=2)
    ask(sim, 1, NOW + 300)
    ask(sim, 2)
    for _ in range(num_steps):
        sim.step()
    assert error_of(sim, NOW + 99) == [] and error_of(sim, NOW + 101) == [(0, 0, 504), (0, 1, 504)]
    sim.run()
    assert {rid: sim.terminal[rid] for rid in (0, 1, 2)} == {0: "error", 1: "length", 2: "length"}
    assert error_of(sim, NOW + 1000) == [], "a request that has ended ends again"


def test_a_request_that_awaits_pixels_may_expire() -> None:
    sim = simulation()
    sim.answers = False
    prompt = [PLACEHOLDER] * 4 + [20]
    wire = make_request(0, prompt, [(0, 4, b"a")], 2, files={0})
    sim.add(msgspec.structs.replace(wire, deadline=NOW + 10), prompt)
    sim.step()
    assert len(sim.open) == 1 and error_of(sim, NOW + 11) == [(0, 0, 503)]
    sim.answer(sim.open[0])
    sim.run()
