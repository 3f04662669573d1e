"""Orders for weights: nothing computed with previous weights is used afterwards, and every order and every request has one answer."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.updates.control import UpdateControl
from engine.wire.updates import Drain, FromFolder, FromGroup, FromMemory, Job, JobState, OrderDone, Pause, Resume, Verdict
from tests.unit.scheduler.simulation import Simulation, make_core, make_request
from tests.unit.scheduler.test_properties import random_prompt

NUM_RANKS = 2
DRAINS: tuple[Drain, ...] = ("wait", "abort", "keep")


class Workers:
    """All ranks: they answer at once, as `refuses` says, and lose everything that they have computed when weights change."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.refuses, self.num_executed = sim, False, 0
        self.done: dict[int, OrderDone] = {}
        self.control = UpdateControl(sim.core, NUM_RANKS, self.take, self.answer)
        self._replies: list[JobState] = []

    def answer(self, done: OrderDone) -> None:
        assert self.done.setdefault(done.number, done) is done, "answered twice"

    def take(self, message: Job | Verdict) -> None:
        assert not self.sim.in_flight
        if isinstance(message, Job):
            problems = [None, "it does not fit" if self.refuses else None]
        elif message.is_granted:
            problems = [None, None]
            self.num_executed += 1
            worker = self.sim.worker
            worker.slots.clear()
            worker.saved.clear()
            worker.images = dict.fromkeys(worker.images, b"of previous weights")
        else:
            problems = []
        self._replies += map(JobState, problems)

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
        sim.add(msgspec.structs.replace(wire, n=rng.choice([1, 1, 3]), priority=rng.choice([0, 1, -1])), prompt)
        for _ in range(rng.randint(0, 3)):
            sim.step()
            workers.advance()
        choice = rng.random()
        if choice < 0.3:
            is_paused = True
            workers.control.take(Pause(number, rng.choice(DRAINS)))
        elif choice < 0.6:
            is_paused = False
            workers.control.take(Resume(number))
        else:
            workers.refuses = rng.random() < 0.3
            workers.control.take(Job(number, FromFolder("x"), rng.choice(DRAINS), str(number)))
            for _ in range(1000):
                workers.advance()
                if number in workers.done or not sim.step():
                    break
            granted += not workers.refuses
            assert (workers.done[number].problem is None) != workers.refuses
            assert workers.refuses or workers.done[number].version == sim.core.state.metadata["weight_version"] == str(number)
        workers.advance()
        assert workers.num_executed == granted
        assert not (is_paused and sim.core.state.is_open)
    workers.control.take(Resume(40))
    sim.run()
    workers.advance()
    assert workers.done.keys() == set(range(41)), "an order has no answer"
    assert len(sim.terminal) == len(sim.sequences)


def test_a_pause_ends_or_keeps_what_runs() -> None:
    """Requests that arrive later wait; those that are kept give the same tokens as without a pause."""
    finished: dict[Drain, tuple[int, str]] = {}
    for mode in DRAINS:
        sim = Simulation(make_core())
        workers = Workers(sim)
        sim.ask(0, [20, 21, 22], [], 9, ignore_eos=True)
        for _ in range(4):
            sim.step()
        workers.control.take(Pause(0, mode))
        sim.ask(1, [20, 21], [], 2, ignore_eos=True)
        while sim.step():
            pass
        workers.advance()
        assert workers.done[0].num_waiting == (2 if mode == "keep" else 1)
        assert not sim.step() and 1 not in sim.terminal
        assert sim.core.alive_at(1e12) == 1e12, "waiting for a trainer is no hang"
        workers.control.take(Resume(1))
        sim.run()
        finished[mode] = len(sim.received[0]), sim.terminal[0]
    assert finished["wait"] == finished["keep"] == (9, "length")
    assert finished["abort"][0] < 9 and finished["abort"][1] == "abort"


def test_updates_in_several_requests_belong_together() -> None:
    """After one that failed, the engine does not go on with a mixture."""
    sim = Simulation(make_core())
    workers = Workers(sim)

    def give(order: Pause | Resume | Job, refuses: bool = False) -> str | None:
        workers.refuses = refuses
        workers.control.take(order)
        workers.advance()
        return workers.done[order.number].problem

    assert give(Job(0, FromMemory(())), refuses=True) == "it does not fit"
    assert sim.core.state.is_open, "nothing was written"
    give(Pause(1, "wait"))
    assert give(Job(2, FromMemory(())), refuses=True) and give(Resume(3)) is None
    give(Pause(4, "wait"))
    give(Job(5, FromGroup("g", ())))
    assert give(Job(6, FromGroup("g", ())), refuses=True)
    assert "mixture" in str(give(Resume(7))) and not sim.core.state.is_open
    assert give(Job(8, FromFolder("x"))) is None and give(Resume(9)) is None and sim.core.state.is_open


def test_a_resume_before_all_requests_have_ended() -> None:
    sim = Simulation(make_core())
    workers = Workers(sim)
    sim.ask(0, [20], [], 5, ignore_eos=True)
    sim.step()
    workers.control.take(Pause(0, "wait"))
    workers.advance()
    assert 0 not in workers.done
    workers.control.take(Resume(1))
    assert "resumed before" in str(workers.done[0].problem) and workers.done[1].problem is None
    sim.run()
