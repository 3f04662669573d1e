"""Images that come as files: their pixels are asked for when they must be encoded, and only then; nobody else waits for them."""


import msgspec
import pytest

from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request
from tests.unit.scheduler.test_prefix_in_the_making import plan

LENGTH = 8


def simulation(**limits: int | bool) -> Simulation:
    """Room for everything, unless `limits` say otherwise. Questions stay open until a test answers them."""
    defaults = {"num_blocks": 200, "image_tokens": 200, "max_num_batched_tokens": 64, "max_num_mixed_tokens": 64}
    sim = Simulation(make_core(**{"max_num_encoder_tokens": 64, **defaults, **limits}))
    sim.answers = False
    return sim


def show(sim: Simulation, rid: int, names: bytes, files: bool = True, first: int = 0, max_tokens: int = 4) -> None:
    """A request about images of these names; its first token is its own, so that no prefix is shared, unless `first` is given."""
    prompt, images = [first or 1000 + rid], []
    for name in names:
        images.append((len(prompt), LENGTH, bytes([name])))
        prompt += [PLACEHOLDER] * LENGTH + [20]
    wire = make_request(rid, prompt, images, max_tokens, range(len(images)) if files else (), ignore_eos=True)
    sim.add(wire, prompt)


def finish(sim: Simulation) -> None:
    sim.answers = True
    sim.run()


def evict(sim: Simulation, digest: bytes) -> None:
    sim.core.state.images.forget(digest)


def questions(sim: Simulation) -> list[tuple[int, int]]:
    """All that the core has asked for so far, as (request, index of the image)."""
    return [(wanted.rid, wanted.index) for wanted in sim.asked.values()]


def test_a_cached_embedding_needs_no_pixels() -> None:
    sim = simulation()
    show(sim, 0, b"ab", files=False)
    sim.run()
    show(sim, 1, b"ba")
    sim.run()
    assert not sim.asked and sim.core.state.counters.images_encoded == 2


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_an_image_in_the_prefix_cache_needs_no_pixels(prefix_cache: bool) -> None:
    """Red if a file is not decoded although some of its tokens and its embedding are missing."""
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
    """Red if a request starts before its pixels are there, or delays the next ones."""
    sim = simulation(max_num_batched_tokens=16)
    show(sim, 0, b"abc")
    show(sim, 1, b"d", files=False)
    while sim.step():
        pass
    assert questions(sim) == [(0, 0), (0, 1), (0, 2)]
    assert sim.terminal == {1: "length"}
    for wanted in list(sim.open):
        assert not sim.step()
        sim.answer(wanted)
    sim.run()
    assert sim.terminal[0] == "length" and sim.core.state.counters.images_encoded == 4


def test_a_request_keeps_its_row_and_its_blocks_while_it_waits() -> None:
    for limits in ({"max_num_seqs": 2}, {"num_blocks": 3 + 3 + 2}):
        sim = simulation(**limits)
        show(sim, 0, b"a")
        for rid in (1, 2):
            show(sim, rid, b"d", files=False, max_tokens=6)
        sim.step()
        sim.step()
        assert [request.rid for request in sim.core.state.running] == [1]
        finish(sim)


def test_the_same_file_is_asked_for_once() -> None:
    """Also if one of the two occurrences has pixels."""
    sim = simulation()
    show(sim, 0, b"aab")
    sim.step()
    assert questions(sim) == [(0, 0), (0, 2)]
    finish(sim)
    prompt = [30, *[PLACEHOLDER] * 16, 20]
    sim.ask(1, prompt, [(1, 8, b"x"), (9, 8, b"x")], 2, files=[0])
    sim.run()
    assert len(sim.asked) == 2


@pytest.mark.parametrize("is_bad", [False, True])
def test_a_client_that_leaves_while_its_image_is_decoded(is_bad: bool) -> None:
    """Red if the late answer is taken for another request's."""
    sim = simulation()
    show(sim, 0, b"a")
    show(sim, 1, b"a")
    sim.step()
    sim.abort(0)
    assert sim.released == {0}
    if is_bad:
        sim.bad_files = {sim.sequences[0].wire.images[0].hash}
    sim.answer(sim.open[0])
    assert not sim.step() and 1 not in sim.terminal
    sim.bad_files = set()
    finish(sim)
    assert sim.terminal[1] == "length"


def test_eviction_while_it_waits_for_another_image() -> None:
    """Red if a request starts with an image that was cached only when it asked for its others."""
    sim = simulation(image_tokens=2 * LENGTH)
    show(sim, 0, b"a", files=False)
    sim.run()
    show(sim, 1, b"ab")
    sim.step()
    assert questions(sim) == [(1, 1)]
    show(sim, 2, b"cd", files=False)
    while sim.step():
        pass
    sim.answer(sim.open[0])
    assert not sim.step()
    assert questions(sim) == [(1, 1), (1, 0)]
    finish(sim)
    assert sim.terminal[1] == "length"


@pytest.mark.parametrize("is_bad", [False, True])
def test_eviction_of_what_a_running_request_has_not_reached(is_bad: bool) -> None:
    """Red if the request is planned without pixels, stops others, or keeps resources when it fails."""
    sim = simulation(max_num_batched_tokens=10, max_num_mixed_tokens=10)
    show(sim, 0, b"ab", files=False, max_tokens=1)
    sim.run()
    show(sim, 1, b"ab")
    plan(sim)
    request = sim.core.state.running[0]
    assert request.num_computed == request.images[1].start and not sim.asked
    evict(sim, request.images[1].hash)
    show(sim, 2, b"d", files=False)
    while sim.step():
        pass
    assert questions(sim) == [(1, 1)]
    assert sim.terminal == {0: "length", 2: "length"} and [request.rid for request in sim.core.state.running] == [1]
    sim.bad_files = {request.images[1].hash} if is_bad else set()
    finish(sim)
    assert sim.terminal[1] == ("error" if is_bad else "length")


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_preempted_request_has_its_pixels_still(is_cached: bool) -> None:
    sim = simulation(prefix_cache=False)
    if is_cached:
        show(sim, 9, b"a", files=False)
        sim.run()
    show(sim, 0, b"a", max_tokens=20)
    sim.answers = True
    while not (sim.core.state.running and sim.core.state.running[0].num_output > 4):
        sim.step()
    assert len(sim.asked) == (not is_cached)
    request = sim.core.state.running[0]
    sim.core.state.preempt(request)
    evict(sim, request.images[0].hash)
    sim.run()
    assert questions(sim) == [(0, 0)] and len(sim.received[0]) == 20


def test_a_file_that_cannot_be_decoded_ends_its_request() -> None:
    sim = simulation()
    show(sim, 0, b"ab")
    show(sim, 1, b"b")
    sim.step()
    sim.bad_files = {sim.sequences[0].wire.images[0].hash}
    finish(sim)
    assert sim.terminal == {0: "error", 1: "length"}


def test_images_that_become_much_smaller_cost_their_pixels() -> None:
    """Red if a step takes any number of large images because each has few tokens."""
    sim = simulation()
    show(sim, 1, b"abcdef", files=False)
    request = sim.core._requests[1][0]
    for digest, source in request.sources.items():
        request.sources[digest] = msgspec.structs.replace(source, height=4096, width=32)  # 32 tokens' worth; a step takes 64
    steps = [sim.core.next_step() for _ in range(3)]
    assert [len(step.plan.encodes) for step in steps if step is not None] == [2, 2, 2]
