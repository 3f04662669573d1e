"""Several answers to one request: one encode, one prefill, a block more for each further answer; and who comes first of all requests."""

import itertools
import random
from typing import cast

import msgspec
import numpy as np
import pytest

from engine.scheduler.core import UNREADABLE
from engine.wire.messages import StepResult
from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request

BLOCK = 4
NUM_ANSWERS = 5
IMAGE = (1, 3, b"a")


def simulation(**limits: object) -> Simulation:
    return Simulation(make_core(num_blocks=200, block_size=BLOCK, image_tokens=100, max_num_seqs=8, **limits), random.Random(0))


def ask(sim: Simulation, rid: int, num_prompt: int, max_tokens: int) -> None:
    has_image = num_prompt > sum(IMAGE[:2])
    prompt = [20, *[PLACEHOLDER] * IMAGE[1], *[21] * num_prompt] if has_image else [20] * num_prompt
    wire = make_request(rid, prompt[:num_prompt], [IMAGE] if has_image else [], max_tokens, ignore_eos=True, seed=7)
    sim.add(msgspec.structs.replace(wire, n=NUM_ANSWERS), prompt[:num_prompt])


def test_answers_share_the_prompt() -> None:
    for case in itertools.product([True, False], [8, 13, 64], range(1, 18)):
        prefix_cache, budget, num_prompt = case
        sim = simulation(prefix_cache=prefix_cache, max_num_batched_tokens=budget, max_num_mixed_tokens=budget)
        ask(sim, 0, num_prompt, max_tokens=6)
        sim.run()
        counters = sim.core.state.counters
        rest = num_prompt - prefix_cache * ((num_prompt - 1) // BLOCK * BLOCK)
        assert counters.computed_tokens == num_prompt + (NUM_ANSWERS - 1) * rest + NUM_ANSWERS * 5, case
        assert counters.images_encoded == (num_prompt > 4) and (rest <= BLOCK or not prefix_cache), case
        assert len(sim.received) == NUM_ANSWERS and len({tuple(tokens) for tokens in sim.received.values()}) == NUM_ANSWERS, case
        assert counters.cached_prompt_tokens == 0, case


def test_answers_share_the_states_of_the_prompt() -> None:
    """The second one keeps states where it branches off."""
    sim = simulation(snapshot_blocks=2, max_num_batched_tokens=64, max_num_mixed_tokens=64)
    ask(sim, 0, 14, max_tokens=1)
    sim.run()
    assert sim.core.state.counters.computed_tokens == 14 + 10 + (NUM_ANSWERS - 2) * 2 and sim.worker.num_loaded == NUM_ANSWERS - 1


def test_an_answer_that_fails_ends_the_others() -> None:
    core = make_core(num_blocks=200, max_num_batched_tokens=64)
    core.add(msgspec.structs.replace(make_request(1, [20] * 5, [], 30, ignore_eos=True), n=3), np.full(5, 20, dtype=np.int32))
    while (step := core.next_step()) is not None:
        num_samples = sum(chunk.sample for chunk in step.plan.chunks)
        failed = {0: UNREADABLE} if num_samples else {}
        core.collect(StepResult(0, step.plan.step, [20] * num_samples, [], 0.0, 0.0, failed_samples=failed))
    outputs = core.take_outputs(None, 0.0)
    assert sorted(output.index for output in outputs.outputs if output.error is not None) == [0, 1, 2] and outputs.released == [1]
    assert core.state.num_steps <= 2


@pytest.mark.parametrize(("length", "limits"), [(17, {}), (6, {"image_tokens": 5})], ids=["encoder", "cache"])
def test_an_image_that_can_never_be_encoded_is_refused(length: int, limits: dict[str, int]) -> None:
    core = make_core(num_blocks=200, max_num_batched_tokens=64, **limits)
    prompt = [20, *[PLACEHOLDER] * length, 21]
    core.add(make_request(1, prompt, [(1, length, b"a")], 9), np.asarray(prompt, dtype=np.int32))
    outputs = core.take_outputs(None, 0.0)
    (error,) = (output.error for output in outputs.outputs)
    assert error is not None and f"An image takes {length} tokens" in error.message and outputs.released == [1]


def test_max_tokens_are_those_that_the_context_leaves() -> None:
    for max_tokens, expected in ((0, 1), (5, 5), (None, 800 - 6)):
        core = make_core(num_blocks=200, max_num_batched_tokens=64)
        core.add(make_request(1, [20] * 6, [], cast(int, max_tokens)), np.full(6, 20, dtype=np.int32))
        assert core.state.waiting[0].max_tokens == expected
