"""When the scheduler says that the engine is alive: what `/health` is made of."""

import random
import time

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
