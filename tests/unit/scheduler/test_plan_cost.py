"""What must not grow: the cost of a plan and of failing images, copies of log-probabilities, and memory of ended requests."""

import gc
import operator
import random
import sys
from collections import OrderedDict
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler.blocks import FreeList
from engine.scheduler.core import SchedulerCore
from engine.scheduler.policy import MOST_FOUND
from engine.scheduler.request import Request
from engine.wire.messages import StepResult
from engine.wire.reports import PromptLogprobs, joined
from tests.unit.scheduler.invariants import check_core
from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request

NUM_ROWS = 32

TraceFunction = Any


def num_instructions_of_a_plan(core: SchedulerCore) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    sys.settrace(trace)
    step = core.next_step()
    sys.settrace(None)
    assert step is not None and len(step.plan.chunks) == NUM_ROWS and all(chunk.length == 1 for chunk in step.plan.chunks)
    return count


def decoding_core(num_images: int) -> SchedulerCore:
    core = make_core(num_blocks=400, image_tokens=1000, max_num_seqs=NUM_ROWS, max_num_batched_tokens=600, max_num_encoder_tokens=600)
    sim = Simulation(core)
    prompt = [PLACEHOLDER, 20] * num_images + [20]
    sim.ask(0, prompt, [(2 * i, 1, b"%d" % i) for i in range(num_images)], 1)
    sim.run()
    for rid in range(1, NUM_ROWS + 1):
        sim.ask(rid, [20 + rid], [], 9, ignore_eos=True)
    assert sim.step() and core.state.images.used_bytes == num_images * core.state.limits.bytes_per_image_token
    return core


def test_a_decode_costs_the_same_however_many_images_are_cached() -> None:
    assert num_instructions_of_a_plan(decoding_core(250)) == num_instructions_of_a_plan(decoding_core(0))


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


NUM_TOP = 2


def part_of(values: np.ndarray, start: int, end: int) -> PromptLogprobs:
    tops = np.repeat(values[start:end], NUM_TOP)
    return PromptLogprobs(start, NUM_TOP, values[start:end].tobytes(), tops.astype(np.int32).tobytes(), tops.tobytes())


def test_log_probabilities_of_a_prompt_are_copied_once_and_of_one_computation() -> None:
    previous, values, parts = np.zeros(1000, np.float32), np.arange(1000, dtype=np.float32), list[Any]()
    for start, end in ((1, 400), (400, 500)):
        part_of(previous, start, end).add_to(parts)
    sent = [part_of(values, *bounds) for bounds in ((1, 300), (300, 600), *((at, at + 1) for at in range(600, 1000)))]
    for part in sent:
        part.add_to(parts)
    assert len(parts) == len(sent) and all(map(operator.is_, parts, sent))
    found = joined(parts)
    assert isinstance(found, PromptLogprobs) and found.start == 1
    assert np.array_equal(np.frombuffer(found.logprobs, np.float32), values[1:])
    assert np.array_equal(np.frombuffer(found.top_ids, np.int32).reshape(-1, NUM_TOP)[:, 1], values[1:].astype(np.int32))


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
