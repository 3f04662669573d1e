"""New requests that share a prefix: one computes it, the others wait."""

import msgspec
import pytest

from engine.scheduler.core import SchedulerCore
from engine.scheduler.policy import PlannedStep
from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request, pairs

BLOCK = 4
PAGES = [(2 + 9 * i, 8, bytes([i])) for i in range(5)]
DOCUMENT = [20, 21, *[*[PLACEHOLDER] * 8, 22] * 5]  # 47 tokens: 11 blocks and a rest


def library(**limits: int | bool) -> Simulation:
    defaults = {"num_blocks": 200, "image_tokens": 200, "max_num_batched_tokens": 64, "max_num_mixed_tokens": 64}
    return Simulation(make_core(**{"max_num_seqs": 16, "max_num_encoder_tokens": 64, **defaults, **limits}))


def ask(sim: Simulation, rid: int, salt: str = "", max_tokens: int = 4) -> None:
    prompt = [*DOCUMENT, 100 + rid, 23, 24]
    wire = make_request(rid, prompt, PAGES, max_tokens, ignore_eos=True)
    sim.add(msgspec.structs.replace(wire, cache_salt=salt), prompt)


def say(sim: Simulation, rid: int, num_tokens: int, max_tokens: int = 4) -> None:
    prompt = [1000 + rid] * num_tokens
    sim.ask(rid, prompt, [], max_tokens, ignore_eos=True)


def running(core: SchedulerCore) -> list[int]:
    return [request.rid for request in core.state.running]


def prefills_of(step: PlannedStep) -> list[int]:
    return [request.rid for request, chunk in pairs(step) if chunk.length > 1]


def plan(sim: Simulation) -> PlannedStep:
    step = sim.core.next_step()
    assert step is not None
    sim.in_flight.append((step, sim.worker.execute(step, sim.sequences), []))
    return step


def test_a_waiting_request_starts_in_one_piece_and_as_soon_as_the_prefix_is_there() -> None:
    sim = library(max_num_batched_tokens=16, max_num_mixed_tokens=16, max_num_encoder_tokens=16)
    ask(sim, 0, max_tokens=50)
    ask(sim, 1)
    leader, follower = sim.core.state.waiting
    while 1 not in running(sim.core):
        is_there = leader.num_committed >= 11
        sim.step()
        assert (1 in running(sim.core)) == is_there
    assert follower.num_cached == 44 and 0 not in sim.terminal
    sim.run()


def test_others_pass_a_waiting_request_but_do_not_get_ahead_of_it() -> None:
    sim = library()
    ask(sim, 0)
    ask(sim, 1)
    say(sim, 2, 500)
    assert prefills_of(plan(sim)) == [0, 2]
    assert prefills_of(plan(sim)) == [2]  # the document has not landed yet
    sim.step()
    while 1 not in running(sim.core):
        step = plan(sim)
        sim.step()
    assert prefills_of(step) == [1, 2]
    assert running(sim.core) == [0, 1, 2]
    sim.run()


def test_the_next_one_takes_over_from_a_leader_that_is_gone() -> None:
    sim = library(max_num_batched_tokens=16, max_num_mixed_tokens=16)
    for rid in range(4):
        ask(sim, rid)
    sim.step()
    committed = sim.core.state.running[0].num_committed
    assert committed > 0
    sim.abort(0)
    before = sim.core.state.counters.computed_tokens
    sim.step()
    assert running(sim.core) == [1]
    sim.run()
    rest = len(DOCUMENT) % BLOCK + 3
    assert sim.core.state.counters.computed_tokens - before == len(DOCUMENT) + 3 - committed * BLOCK + 2 * rest + 3 * 3


@pytest.mark.parametrize(("budget", "start"), [(44 * 16, [0]), (45 * 16, [0, 1, 2])])
def test_a_short_prefix_is_not_worth_a_wait(budget: int, start: list[int]) -> None:
    sim = library(max_num_batched_tokens=budget)
    for rid in range(3):
        ask(sim, rid)
    plan(sim)
    assert running(sim.core) == start
    sim.run()
