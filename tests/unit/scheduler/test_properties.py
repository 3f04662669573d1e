"""The planner against a brute-force worker."""

import hashlib
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduler import policy
from engine.scheduler import request as request_module
from engine.scheduler.core import SchedulerCore
from engine.wire.adapters import AdapterRef
from engine.wire.step_sizes import HOPPER
from tests.unit.scheduler.simulation import EOS, PLACEHOLDER, TURN, Sequence, Simulation, make_core, make_request, pairs, with_adapter


def random_prompt(rng: random.Random, max_images: int, max_length: int) -> tuple[list[int], list[tuple[int, int, bytes]]]:
    prompt, images = [], []
    for _ in range(rng.randint(0, max_images)):
        prompt += [rng.randint(20, 21) for _ in range(rng.randint(0, 6))]
        name = bytes([rng.randint(0, 5)])
        length = 1 + name[0] * max_length // 5
        images.append((len(prompt), length, name))
        prompt += [PLACEHOLDER] * length
    prompt += [rng.randint(20, 22) for _ in range(rng.randint(1, 10))]
    return prompt, images


def questions_about(
    rng: random.Random, document: tuple[list[int], list[tuple[int, int, bytes]]]
) -> tuple[list[int], list[tuple[int, int, bytes]]]:
    prompt, images = document
    cut = rng.choice([len(prompt), rng.randint(1, len(prompt))])
    kept = [image for image in images if image[0] + image[1] <= cut]
    cut = min([cut, *(image[0] for image in images if image not in kept)])  # an image is whole or not there
    return prompt[:cut] + [rng.randint(20, 22) for _ in range(rng.randint(1, 6))], kept


def drive(
    rng: random.Random,
    sim: Simulation,
    num_requests: int,
    max_image: int,
    fail: bool,
    forget_rate: float,
    max_tokens: int = 12,
    num_adapters: int = 0,
) -> None:
    capacity = sim.core.state.blocks.num_blocks * sim.core.state.blocks.block_size
    if fail:
        sim.bad_images = {hashlib.sha256(bytes([3])).digest()}
        sim.bad_files = {hashlib.sha256(bytes([4])).digest()}
    file_rate = rng.choice([0.0, 0.5, 1.0])
    documents = [random_prompt(rng, 4, max_image) for _ in range(2)]
    for rid in range(num_requests):
        prompt, images = questions_about(rng, rng.choice(documents)) if rng.random() < 0.6 else random_prompt(rng, 4, max_image)
        if len(prompt) >= capacity:
            continue
        salt = rng.choice(["", "", "tenant"])
        files = {i for i in range(len(images)) if rng.random() < file_rate}
        wire = make_request(rid, prompt, images, rng.randint(1, max_tokens), files, ignore_eos=rng.random() < 0.5)
        wire = msgspec.structs.replace(wire, cache_salt=salt, n=rng.choice([1, 1, 2, 5]))
        if number := rng.randint(0, num_adapters):
            wire = with_adapter(wire, AdapterRef(number, f"a{number}", "", number % 2 == 0))
        sim.add(wire, prompt)
        for _ in range(rng.choice([0, 0, 0, 1, 2, 3])):
            sim.step()
        if rng.random() < 0.15:
            victim = sim.sequences[rng.choice(list(sim.sequences))]
            sim.abort(victim.wire.rid, rng.choice([None, victim.index]))
        if forget_rate and rng.random() < forget_rate:
            sim.core.forget_all(images=rng.random() < 0.5)
    sim.run()


ANY = st.booleans()
# What a load has, depending on two random booleans.
LOADS = {
    "plain": lambda one, other: {},
    "caches are emptied": lambda one, other: {"forget_rate": 0.5},
    "drafts of any source": lambda one, other: {"drafts": True},
    "a drafter": lambda one, other: {"drafter": True, "forget_rate": 0.3 * one, "stateful": other},
    "a model's head": lambda one, other: {"drafter": True, "forget_rate": 0.3 * one, "stateful": other, "head": True},
    "steps run out of memory": lambda one, other: {"give_up_rate": 0.1},
    "adapters": lambda one, other: {"num_adapters": 4, "stateful": one, "give_up_rate": 0.1 * other},
    "states": lambda one, other: {"stateful": True, "forget_rate": 0.3 * one, "give_up_rate": 0.1 * other},
}


@pytest.mark.parametrize("load", LOADS)
@given(seed=st.integers(0, 10**9), prefix_cache=ANY, tight=ANY, fail=ANY, one=ANY, other=ANY)
def test_any_load_is_served_correctly(load: str, seed: int, prefix_cache: bool, tight: bool, fail: bool, one: bool, other: bool) -> None:
    """Red if a plan reads KV, embeddings or states of something else (also of refused drafts, or of a step that was given up), encodes a
    file, leaks a block, pin or row, loses a terminal event, stops, or if answers depend on drafts.

    The simulation also asserts that no request computes a prefix that an older one is computing, asks for pixels it has, continues before
    it is known how many drafts hold, or exceeds a budget, and that drafts delay no other row.
    """
    gives_up = load == "steps run out of memory"
    sim = serve_any_load(prefix_cache, seed, tight, fail and not gives_up, **LOADS[load](one, other))
    assert not gives_up or sim.given_up or "error" not in sim.terminal.values()


def serve_any_load(
    prefix_cache: bool,
    seed: int,
    tight: bool,
    fail: bool,
    drafts: bool = False,
    give_up_rate: float = 0.0,
    forget_rate: float = 0.0,
    stateful: bool = False,
    drafter: bool = False,
    head: bool = False,
    num_adapters: int = 0,
) -> Simulation:
    rng = random.Random(seed)
    core = make_core(
        num_blocks=rng.randint(10, 16) if tight else 64,
        image_tokens=rng.randint(10, 14) if tight else 60,
        max_num_batched_tokens=rng.choice([5, 8, 16, 64]),
        max_num_encoder_tokens=rng.choice([9, 12, 40]),
        prefix_cache=prefix_cache,
        mixed_step_tokens=rng.choice([1, 3, 20]),
        snapshot_blocks=rng.randint(1, 3) if stateful else 0,
        verify_rows=rng.choice([8, 32]) if drafter else 0,
        num_lookahead=3 if head else 0,
        num_ranks=2,
        num_slots=rng.randint(1, 3) if num_adapters else 0,
        step_sizes=HOPPER,
    )
    sim = Simulation(core, rng, num_ranks=2)
    if drafter:
        sim.language, sim.worker.refuse_rate = (rng.choice([1, 2]), seed), rng.choice([0.0, 0.1])
    sim.preempt_rate = rng.choice([0.0, 0.2])
    sim.give_up_rate = give_up_rate
    sim.draft_rate = rng.choice([0.0, 0.5, 1.0]) if drafts else 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(request_module, "MIN_SNAPSHOT_TOKENS", rng.choice([1, 8]))
        drive(rng, sim, 14, 8, fail, forget_rate, 40 if drafter else 12, num_adapters)
    capacity = core.state.blocks.num_blocks * core.state.blocks.block_size - core.state.limits.num_lookahead
    for rid, reason in sim.terminal.items():
        sequence, received = sim.sequences[rid], sim.received.get(rid, [])
        num_prompt = sequence.wire.prompt.length // 4
        produced = sequence.ids[num_prompt:]
        assert received == produced[: len(received)] == undrafted(sequence, len(received))
        if reason == "length":
            assert len(received) == min(sequence.wire.params.max_tokens or 0, capacity - num_prompt)
        if reason == "stop":
            assert received[-1] == EOS
        if reason == "error":
            assert sim.given_up or (fail and any(span.hash in sim.bad_images | sim.bad_files for span in sequence.wire.images))
    return sim


def undrafted(sequence: Sequence, num_tokens: int) -> list[int]:
    alone = Sequence(sequence.wire, sequence.ids[: sequence.wire.prompt.length // 4], sequence.seed, sequence.language)
    return [alone.sample() for _ in range(num_tokens)]


def test_loads_with_drafters_reach_drafts_and_snapshots() -> None:
    for flags in ({"drafter": True}, {"drafter": True, "head": True}, {"drafts": True}):
        sims = [serve_any_load(True, seed, seed % 2 == 1, False, stateful="drafter" in flags, **flags) for seed in range(2, 14)]
        reached = [sum(getattr(sim, name) for sim in sims) for name in ("num_accepted", "num_refused", "num_cut")]
        assert reached[0] > 15 and (min(reached) > 0 or "drafter" in flags), (flags, reached)
        assert sum(sim.core.state.counters.preemptions for sim in sims) > 5
        read = [sum(getattr(sim.worker, name) for sim in sims) for name in ("num_loaded", "num_overwritten")]
        assert min(read) > 50 or "drafts" in flags, (flags, read)


def test_a_repeated_prompt_computes_one_block_and_no_image() -> None:
    prompt = [20, 21, *[PLACEHOLDER] * 9, 22, 23, 24, 25, 26]
    core = make_core(num_blocks=64, max_num_batched_tokens=64)
    sim = Simulation(core)
    sim.ask(0, prompt, [(2, 9, b"a")], 1)
    sim.run()
    before = core.state.counters.computed_tokens
    sim.ask(1, prompt, [(2, 9, b"a")], 1)
    sim.run()
    assert core.state.counters.computed_tokens - before == 4
    assert core.state.counters.images_encoded == 1 and core.state.counters.images_skipped == 1


def test_a_hit_may_end_anywhere_inside_an_image() -> None:
    for cut in range(1, 12):
        first, second = ([*[20] * cut, *[PLACEHOLDER] * 10, *rest] for rest in ([21, 22], [23, 22, 21]))
        core = make_core(num_blocks=64, max_num_batched_tokens=64)
        sim = Simulation(core)
        for rid, prompt in enumerate((first, second)):
            sim.ask(rid, prompt, [(cut, 10, b"a")], 1)
            sim.run()
        assert core.state.counters.images_encoded == 1, cut


def test_what_never_fits_is_refused_at_the_door() -> None:
    core = make_core(num_blocks=8, image_tokens=5)
    sim = Simulation(core)
    sim.add(msgspec.structs.replace(make_request(0, [20] * 32, [], 1), n=2), [20] * 32)
    prompt = [*[PLACEHOLDER] * 6, 20]
    sim.ask(1, prompt, [(0, 6, b"a")], 1)
    sim.run()
    assert sim.terminal == {0: "error", (0, 1): "error", 1: "error"}


def test_steps_are_planned_further_ahead_if_they_are_quick_or_late() -> None:
    core = make_core(num_blocks=64)
    sim = Simulation(core)
    sim.ask(0, [20] * 4, [], 100, ignore_eos=True)
    depths = {True: set(), False: set()}
    while sim.step():
        landed = core.state.num_steps - core.num_in_flight
        if sim.in_flight and landed:
            depths[(landed - 1) // TURN % 3 > 0].add(core.depth)
    assert depths == {True: {3}, False: {2}}


def prefill_sizes_beside(core: SchedulerCore) -> list[int]:
    sim, stream, other = Simulation(core), 0, 1
    sim.ask(stream, [20] * 4, [], 60, ignore_eos=True)
    sim.step()
    sim.ask(other, [21] * 60, [], 1)
    sizes = []
    while sim.in_flight or sim.step():
        while core.num_in_flight < core.depth and (step := core.next_step()) is not None:
            sim.in_flight.append((step, sim.worker.execute(step, sim.sequences), []))
            lengths = {request.rid: chunk.length for request, chunk in pairs(step)}
            assert stream in lengths or other not in lengths, "a step with prompts alone delays the stream"
            if stream in lengths:
                sizes.append(lengths.get(other, 0))
        if not sim.step():
            break
    return sizes


def test_chunks_beside_streams_are_small() -> None:
    core = make_core(num_blocks=64, max_num_batched_tokens=64, max_num_mixed_tokens=32, mixed_step_tokens=24)
    sizes = prefill_sizes_beside(core)
    assert [size for size in sizes if size] == [23, 23, 14]


def test_chunks_grow_with_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MANY_STEPS", 4)
    sizes = msgspec.structs.replace(HOPPER, mixed=(16, 18, 20, 22))
    core = make_core(num_blocks=64, max_num_batched_tokens=64, max_num_mixed_tokens=32, mixed_step_tokens=12, step_sizes=sizes)
    assert [size for size in prefill_sizes_beside(core) if size][:3] == [15, 11, 11]
