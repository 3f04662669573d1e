"""Orders for weights: nothing computed with previous weights is used afterwards, and every order and every request has one answer."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.updates import UpdateControl
from engine.wire.updates import FromFolder, FromGroup, Order, OrderDone, OrderResult
from tests.unit.scheduler.simulation import Simulation, make_core, make_request
from tests.unit.scheduler.test_properties import random_prompt

NUM_RANKS = 2
LATER = 1e12


class Workers:
    """All ranks: they answer at once, those of `refusing` that they cannot; if one has, all lose what they have computed."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.refusing, self.num_executed = sim, list[int](), 0
        self.done: list[OrderDone] = []
        self.control = UpdateControl(sim.core, NUM_RANKS, self.take, self.done.append)
        self._replies: list[OrderResult] = []

    def give(self, task: Any) -> None:
        self.control.take(Order(task))
        self.advance()

    def take(self, order: Order) -> None:
        assert not self.sim.in_flight
        for rank in range(NUM_RANKS):
            problem = "it does not fit" if rank in self.refusing else None
            self._replies.append(OrderResult(problem))
        if len(self.refusing) < NUM_RANKS:
            self.num_executed += 1
            worker = self.sim.worker
            worker.slots.clear()
            worker.saved.clear()
            worker.images = dict.fromkeys(worker.images, b"of previous weights")

    def advance(self) -> None:
        """One pass of the scheduler's loop."""
        self.control.advance()
        while self._replies:
            self.control.take(self._replies.pop(0))


@pytest.mark.parametrize("snapshot_blocks", [0, 2])
@given(seed=st.integers(0, 1 << 32))
def test_updates_under_load(snapshot_blocks: int, seed: int) -> None:
    rng = random.Random(seed)
    sim = Simulation(make_core(num_blocks=64, snapshot_blocks=snapshot_blocks), rng)
    workers = Workers(sim)
    is_paused, granted = False, 0
    for number in range(40):
        prompt, images = random_prompt(rng, 3, 4)
        files = {i for i in range(len(images)) if rng.random() < 0.3}
        wire = make_request(number, prompt, images, rng.randint(1, 9), files)
        sim.add(msgspec.structs.replace(wire, n=rng.choice([1, 1, 3])), prompt)
        for _ in range(rng.randint(0, 3)):
            sim.step()
            workers.advance()
        choice = rng.random()
        if choice < 0.3:
            is_paused = True
            workers.give("pause")
        elif choice < 0.6:
            is_paused = False
            workers.give("resume")
        else:
            refuses = rng.random() < 0.3
            workers.refusing = [0, 1] if refuses else []
            workers.control.take(Order(FromFolder("x"), rng.random() < 0.5, str(number)))
            for _ in range(1000):
                workers.advance()
                if len(workers.done) > number or not sim.step():
                    break
            granted += not refuses
            assert (workers.done[-1].problem is None) != refuses
            assert refuses or workers.done[-1].version == sim.core.state.weight_version == str(number)
        workers.advance()
        assert workers.num_executed == granted
        assert not (is_paused and sim.core.state.is_open)
    workers.give("resume")
    sim.run()
    workers.advance()
    assert len(workers.done) == 41, "an order has no answer, or several"
    assert len(sim.terminal) == len(sim.sequences)


@pytest.mark.parametrize("task", ["pause", FromFolder("x")], ids=["pause", "update"])
def test_a_pause_ends_what_runs_and_an_update_waits_for_it(task: Any) -> None:
    """Requests that arrive later wait."""
    sim = Simulation(make_core())
    workers = Workers(sim)
    sim.ask(0, [20, 21, 22], [], 9, ignore_eos=True)
    for _ in range(4):
        sim.step()
    workers.control.take(Order(task))
    sim.ask(1, [20, 21], [], 2, ignore_eos=True)
    while sim.step():
        pass
    assert not sim.step() and 1 not in sim.terminal
    assert sim.core.alive_at(1e12) == 1e12, "waiting for a trainer is no hang"
    workers.advance()
    workers.give("resume")
    sim.run()
    expected = (False, "abort") if task == "pause" else (True, "length")
    assert len(workers.done) == 2 and (len(sim.received[0]) == 9, sim.terminal[0]) == expected


FOLDER, PART = FromFolder("x"), FromGroup([], [], [])


@pytest.mark.parametrize("is_paused", [True, False])
@pytest.mark.parametrize("task", [FOLDER, PART], ids=["folder", "group"])
def test_a_refused_update_leaves_the_engine_as_it_was(task: Any, is_paused: bool) -> None:
    """If only some ranks refuse it, the engine ends: the others have written."""
    sim = Simulation(make_core())
    workers = Workers(sim)
    if is_paused:
        workers.give("pause")
    workers.refusing = [0, 1]
    workers.give(task)
    assert workers.done[-1].problem is not None and sim.core.state.is_open != is_paused
    workers.refusing = [1]
    with pytest.raises(RuntimeError, match="only some workers"):
        workers.give(task)


def test_an_update_hangs_while_workers_execute_it() -> None:
    sim, sent, done = Simulation(make_core()), list[Any](), list[OrderDone]()
    control = UpdateControl(sim.core, 2, sent.append, done.append)
    control.take(Order(FOLDER))
    for message in (None, OrderResult(), OrderResult()):
        if message is not None:
            control.take(message)
        control.advance()
        assert (control.alive_at(LATER) < LATER) == (not done)
    assert sent == [Order(FOLDER)] and done == [OrderDone("default")]
