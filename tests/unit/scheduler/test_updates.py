"""Orders for weights: nothing computed with previous weights is used afterwards, and every order and every request has one answer."""

import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import updates
from engine.scheduler.updates import UpdateControl
from engine.wire.updates import FromFolder, FromGroup, Job, JobState, OrderDone, Pause, Progress, Resume, Verdict
from tests.unit.scheduler.simulation import Simulation, make_core, make_request
from tests.unit.scheduler.test_properties import random_prompt

NUM_RANKS = 2


class Workers:
    """All ranks: they answer at once, as `refuses` says, and lose everything that they have computed when weights change. A folder has all
    weights, a group some, unless `is_whole`."""

    def __init__(self, sim: Simulation) -> None:
        self.sim, self.refuses, self.is_whole, self.num_executed = sim, False, True, 0
        self.done: dict[int, OrderDone] = {}
        self.control = UpdateControl(sim.core, NUM_RANKS, self.take, self.answer)
        self._replies: list[JobState] = []

    def answer(self, done: OrderDone) -> None:
        assert self.done.setdefault(done.number, done) is done, "answered twice"

    def take(self, message: Job | Verdict) -> None:
        assert not self.sim.in_flight
        if isinstance(message, Job):
            states = [JobState(), JobState("it does not fit" if self.refuses else None)]
        elif message.is_granted:
            states = [JobState(is_whole=self.is_whole)] * 2
            self.num_executed += 1
            worker = self.sim.worker
            worker.slots.clear()
            worker.saved.clear()
            worker.images = dict.fromkeys(worker.images, b"of previous weights")
        else:
            states = []
        self._replies += states

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
            workers.control.take(Pause(number, rng.random() < 0.5))
        elif choice < 0.6:
            is_paused = False
            workers.control.take(Resume(number))
        else:
            workers.refuses = rng.random() < 0.3
            workers.control.take(Job(number, FromFolder("x"), rng.random() < 0.5, str(number)))
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


def test_a_pause_ends_what_runs_or_lets_it_finish() -> None:
    """Requests that arrive later wait."""
    for aborts in (True, False):
        sim = Simulation(make_core())
        workers = Workers(sim)
        sim.ask(0, [20, 21, 22], [], 9, ignore_eos=True)
        for _ in range(4):
            sim.step()
        workers.control.take(Pause(0, aborts))
        sim.ask(1, [20, 21], [], 2, ignore_eos=True)
        while sim.step():
            pass
        workers.advance()
        assert workers.done[0].num_waiting == 1 and not sim.step() and 1 not in sim.terminal
        assert sim.core.alive_at(1e12) == workers.control.alive_at(1e12) == 1e12, "waiting for a trainer is no hang"
        workers.control.take(Resume(1))
        sim.run()
        assert (len(sim.received[0]) == 9, sim.terminal[0]) == ((False, "abort") if aborts else (True, "length"))


PART, WHOLE, FOLDER = FromGroup("g", ()), FromGroup("whole", ()), FromFolder("x")
UPDATES = {  # since a pause: tasks, and which of them are refused; whether a resume is refused then
    "one that is refused": ([(PART, True)], False),
    "all accepted": ([(PART, False), (PART, False)], False),
    "the second is refused": ([(PART, False), (PART, True)], True),
    "the first is refused": ([(PART, True), (PART, False)], True),
    "another one follows": ([(PART, False), (PART, True), (PART, False)], True),
    "a folder is refused": ([(PART, False), (FOLDER, True)], True),
    "a folder follows": ([(PART, False), (PART, True), (FOLDER, False)], False),
    "all tensors follow": ([(PART, True), (PART, False), (WHOLE, False)], False),
    "one is refused after all tensors": ([(PART, False), (WHOLE, False), (PART, True)], False),
}


@pytest.mark.parametrize("name", UPDATES)
def test_updates_between_pause_and_resume_belong_together(name: str) -> None:
    """After one that failed, the engine does not go on with a mixture."""
    (tasks, is_mixed), sim = UPDATES[name], Simulation(make_core())
    workers = Workers(sim)
    workers.control.take(Pause(0, False))
    workers.advance()
    for number, (task, workers.refuses) in enumerate(tasks, 1):
        workers.is_whole = task is not PART
        workers.control.take(Job(number, task))
        workers.advance()
        assert (workers.done[number].problem is not None) == workers.refuses
    workers.control.take(Resume(9))
    assert ("mixture" in str(workers.done[9].problem)) == is_mixed and sim.core.state.is_open != is_mixed
    if is_mixed:
        workers.refuses, workers.is_whole = False, True
        workers.control.take(Job(10, FOLDER))
        workers.advance()
        workers.control.take(Resume(11))
        assert workers.done[11].problem is None and sim.core.state.is_open


def test_a_job_that_hangs_is_no_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it hangs in one rank only, and whatever clients order; a tensor that was read is progress."""
    clock = SimpleNamespace(now=10.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(updates, "time", clock)
    sim, sent, done = Simulation(make_core()), list[Any](), list[OrderDone]()
    control = UpdateControl(sim.core, 2, sent.append, done.append)
    control.take(Job(0, FOLDER))
    assert control.alive_at(1e9) == 1e9
    control.advance()
    for message, expected in ((Pause(1, False), 10.0), (JobState(), 30.0), (Job(2, FOLDER), 30.0), (Progress(), 50.0), (Progress(), 60.0)):
        clock.now += 10.0
        control.take(message)
        assert control.alive_at(1e9) == expected
    assert done == [OrderDone(2, "default", 0, "another update is in progress")]
    control.take(JobState())
    control.take(JobState())
    control.take(JobState())
    assert sent == [Job(0, FOLDER), Verdict(True)] and control.alive_at(1e9) == 1e9 and done[-1].problem is None


def test_a_resume_before_all_requests_have_ended() -> None:
    sim = Simulation(make_core())
    workers = Workers(sim)
    sim.ask(0, [20], [], 5, ignore_eos=True)
    sim.step()
    workers.control.take(Pause(0, False))
    workers.advance()
    assert 0 not in workers.done
    workers.control.take(Resume(1))
    assert "resumed before" in str(workers.done[0].problem) and workers.done[1].problem is None
    sim.run()
