"""Images that come as files: on arrival the core asks for the pixels that it lacks; meanwhile the request is outside the queue."""

import msgspec
import pytest

from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request

LENGTH = 8


def simulation(**limits: int | bool) -> Simulation:
    defaults = {"num_blocks": 200, "image_tokens": 200, "max_num_batched_tokens": 64, "max_num_mixed_tokens": 64}
    sim = Simulation(make_core(**{"max_num_encoder_tokens": 64, **defaults, **limits}))
    sim.answers = False
    return sim


def show(sim: Simulation, rid: int, names: bytes, files: bool = True, first: int = 0) -> None:
    """A request about images of these names; its first token is its own, so that no prefix is shared, unless `first` is given."""
    prompt, images = [first or 1000 + rid], []
    for name in names:
        images.append((len(prompt), LENGTH, bytes([name])))
        prompt += [PLACEHOLDER] * LENGTH + [20]
    wire = make_request(rid, prompt, images, 4, range(len(images)) if files else (), ignore_eos=True)
    sim.add(wire, prompt)


def finish(sim: Simulation) -> None:
    sim.answers = True
    sim.run()


def questions(sim: Simulation) -> list[tuple[int, int]]:
    return [(wanted.rid, index) for wanted in sim.asked for index in wanted.indexes]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_image_in_the_prefix_cache_needs_no_pixels(prefix_cache: bool) -> None:
    sim = simulation(image_tokens=LENGTH, prefix_cache=prefix_cache)
    show(sim, 0, b"ab", files=False, first=21)
    sim.run()
    show(sim, 1, b"c", files=False)  # takes the place of the embeddings
    sim.run()
    show(sim, 2, b"ab", first=21)
    sim.step()
    assert questions(sim) == ([(2, 1)] if prefix_cache else [(2, 0), (2, 1)])  # the last block is always computed: the end of "b"
    finish(sim)


def test_all_pixels_are_asked_for_at_once_and_others_pass() -> None:
    sim = simulation(max_num_batched_tokens=16)
    show(sim, 0, b"abc")
    show(sim, 1, b"d", files=False)
    while sim.step():
        pass
    assert questions(sim) == [(0, 0), (0, 1), (0, 2)]
    assert sim.terminal == {1: "length"}
    (wanted,) = sim.open
    assert not sim.step() and not sim.core.state.waiting
    sim.answer(wanted)
    sim.run()
    assert sim.terminal[0] == "length" and sim.core.state.counters.images_encoded == 4


def test_a_preempted_request_asks_for_what_it_relied_on() -> None:
    sim = simulation(prefix_cache=False, max_num_batched_tokens=2)
    show(sim, 0, b"ab", files=False)
    sim.run()
    show(sim, 1, b"ab")
    sim.step()
    assert sim.core.state.images.num_pinned == 2 and not sim.asked
    sim.core.state.preempt(sim.core.state.running[0])
    sim.core.state.images.forget_unpinned()
    finish(sim)
    assert questions(sim) == [(1, 0), (1, 1)] and sim.terminal[1] == "length"


def test_images_that_become_much_smaller_cost_their_pixels() -> None:
    sim = simulation()
    show(sim, 1, b"abcdef", files=False)
    request = sim.core._requests[1][0]
    for digest, source in request.sources.items():
        request.sources[digest] = msgspec.structs.replace(source, height=4096, width=32)  # 32 tokens' worth; a step takes 64
    steps = [sim.core.next_step() for _ in range(3)]
    assert [len(step.plan.encodes) for step in steps if step is not None] == [2, 2, 2]
