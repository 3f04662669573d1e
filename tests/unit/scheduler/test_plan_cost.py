"""What must not grow: the cost of a plan, and memory of ended requests."""

import gc
import random
from collections import OrderedDict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.blocks import FreeList
from engine.scheduler.policy import MOST_FOUND
from engine.scheduler.request import Request
from engine.wire.messages import StepResult
from tests.unit.scheduler.invariants import check_core
from tests.unit.scheduler.simulation import Simulation, make_core, make_request

NUM_ROWS = 32


def test_many_long_cached_prompts_do_not_start_in_one_plan() -> None:
    length, num_prompts = 16_366, 12
    core = make_core(num_blocks=20_000, block_size=16, max_num_seqs=NUM_ROWS, max_num_batched_tokens=8192, max_num_mixed_tokens=1000)
    core._capacity = 2 * length
    sim = Simulation(core)
    prompt = [20 + i % 97 for i in range(length)]
    sim.ask(0, prompt, [], 1)
    sim.run()
    for rid in range(1, num_prompts + 1):
        core.add(make_request(rid, prompt, [], 2), np.asarray(prompt, dtype=np.int32))
    found = []
    while len(found) < 4:
        step = core.next_step()
        assert step is not None
        found.append(sum(chunk.start for chunk in step.plan.chunks if chunk.length > 1))
    assert max(found) <= MOST_FOUND and sum(found) > 11 * length, found


NUM_BLOCKS = 40


def result_of(step: int, num_sampled: int) -> StepResult:
    return StepResult(rank=0, step=step, token_ids=[20] * num_sampled, failed_images=[], launched=1.0, done=1.0)


def num_requests() -> int:
    return sum(type(thing) is Request for thing in gc.get_objects())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("is_aborted", [False, True])
def test_an_ended_request_leaves_no_cycle(n: int, is_aborted: bool) -> None:
    core = make_core(num_blocks=200, max_num_seqs=8)
    prompt = list(range(100, 140))
    gc.collect()
    num_before = num_requests()
    gc.disable()
    try:
        for rid in range(4):
            wire = msgspec.structs.replace(make_request(rid, prompt, [], 3), n=n)
            core.add(wire, np.array(prompt, np.int32))
        while (step := core.next_step()) is not None:
            if is_aborted and step.plan.step == 1:
                for rid in range(4):
                    core.abort(rid)
            core.collect(result_of(step.plan.step, sum(chunk.sample for chunk in step.plan.chunks)))
        del step
        check_core(core)
        assert core.num_requests == 0
        assert num_requests() == num_before
    finally:
        gc.enable()


@given(seed=st.integers(0, 10**6))
def test_the_free_list_is_an_ordered_dict(seed: int) -> None:
    rng = random.Random(seed)
    free, expected = FreeList(NUM_BLOCKS), OrderedDict.fromkeys(range(NUM_BLOCKS))
    for _ in range(400):
        action = rng.choice(("pop", "remove", "add") if seed % 2 else ("pop", "remove", "add", "add"))
        if action == "pop" and expected:
            assert free.pop_first() == expected.popitem(last=False)[0]
        elif action == "remove" and expected:
            free.remove(block := rng.choice(list(expected)))
            del expected[block]
        elif action == "add" and len(expected) < NUM_BLOCKS:
            block, last = rng.choice([block for block in range(NUM_BLOCKS) if block not in expected]), rng.random() < 0.7
            free.add(block, last)
            expected[block] = None
            expected.move_to_end(block, last)
        assert {block for block in range(NUM_BLOCKS) if block in free} == set(expected) and len(free) == len(expected)
    assert [free.pop_first() for _ in range(len(free))] == list(expected)
