"""What a plan costs the host, counted in instructions: a time would depend on the machine."""

import random
import sys
from types import FrameType
from typing import Any

import numpy as np

from engine.scheduler.core import SchedulerCore
from engine.scheduler.policy import MOST_FOUND
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
    sim = Simulation(core, random.Random(0))
    prompt = [PLACEHOLDER, 20] * num_images + [20]
    sim.add(make_request(0, prompt, [(2 * i, 1, b"%d" % i) for i in range(num_images)], 1), prompt)
    sim.run()
    for rid in range(1, NUM_ROWS + 1):
        sim.add(make_request(rid, [20 + rid], [], 9, ignore_eos=True), [20 + rid])
    assert sim.step() and core.state.images.used_bytes == num_images * core.state.limits.bytes_per_image_token
    return core


def test_a_decode_costs_the_same_however_many_images_are_cached() -> None:
    """A sum over all cached images for every row took 9.5 ms per plan."""
    assert num_instructions_of_a_plan(decoding_core(250)) == num_instructions_of_a_plan(decoding_core(0))


def test_many_long_cached_prompts_do_not_start_in_one_plan() -> None:
    """A plan that took the blocks of 128 prompts delayed every stream for 0.36 s."""
    length, num_prompts = 16_366, 12
    core = make_core(num_blocks=20_000, block_size=16, max_num_seqs=NUM_ROWS, max_num_batched_tokens=8192, max_num_mixed_tokens=1000)
    core._capacity = 2 * length
    sim = Simulation(core, random.Random(0))
    prompt = [20 + i % 97 for i in range(length)]
    sim.add(make_request(0, prompt, [], 1), prompt)
    sim.run()
    for rid in range(1, num_prompts + 1):
        core.add(make_request(rid, prompt, [], 2), np.asarray(prompt, dtype=np.int32))
    found = []
    while len(found) < 4:
        step = core.next_step()
        assert step is not None
        found.append(sum(chunk.start for chunk in step.plan.chunks if chunk.length > 1))
    assert max(found) <= MOST_FOUND and sum(found) > 11 * length, found
