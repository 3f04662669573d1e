"""Which image workers are told to read before they have a plan, and which plan then names it."""

import random

import msgspec
import pytest

from engine.messages import ImageSource, Prefetch, Region, StepPlan, Upcoming
from engine.scheduler.core import MAX_PREFETCHED_BYTES, MAX_PREFETCHED_PIXELS
from tests.unit.scheduler.simulation import PLACEHOLDER, Simulation, make_core, make_request

LENGTH = 8


def simulation() -> Simulation:
    return Simulation(make_core(num_blocks=200, image_tokens=200, max_num_batched_tokens=64, max_num_encoder_tokens=64), random.Random(0))


def announce(sim: Simulation, rid: int, name: bytes) -> Prefetch | None:
    return sim.core.prefetch(Upcoming(rid, make_request(rid, [], [(0, LENGTH, name)], 1).images[0].source))


def show(sim: Simulation, rid: int, *names: bytes) -> None:
    prompt, images = [1000 + rid], []
    for name in names:
        images.append((len(prompt), LENGTH, name))
        prompt += [PLACEHOLDER] * LENGTH + [20]
    sim.add(make_request(rid, prompt, images, 4, ignore_eos=True), prompt)


def numbers(sim: Simulation) -> list[int | None]:
    """Those that the next plan's encodes name; the plan is not carried out."""
    step = sim.core.next_step()
    assert step is not None and isinstance(step.plan, StepPlan)
    return [encode.prefetch for encode in step.plan.encodes]


def test_the_first_image_is_read_before_the_request_is_there() -> None:
    """Red if the plan does not name what was read, or another image by its number."""
    sim = simulation()
    prefetch = announce(sim, 0, b"b")
    assert prefetch is not None
    show(sim, 0, b"a", b"b")
    assert numbers(sim) == [None, prefetch.number]
    assert sim.core.state.counters.images_prefetched == 1 and sim.core.state.prefetched is None


def test_nothing_is_read_early_while_there_is_work() -> None:
    """Red if a step that could run has to wait for an image that is needed later."""
    sim = simulation()
    show(sim, 0, b"a")
    assert announce(sim, 1, b"b") is None
    sim.run()
    assert announce(sim, 1, b"b") is not None


@pytest.mark.parametrize("rid", [1, 2])
def test_bytes_belong_to_the_request_that_brought_them(rid: int) -> None:
    """Red if pixels for a request that ended unsent, at whose bytes' place there is another image by now, are taken for that one's."""
    sim = simulation()
    prefetch = announce(sim, 1, b"a")
    assert prefetch is not None
    show(sim, rid, b"a")
    assert numbers(sim) == [prefetch.number if rid == 1 else None]


def test_the_last_announced_image_is_the_one_that_workers_have() -> None:
    """Red if a plan names a number that another one has taken the place of: the worker would not find it."""
    sim = simulation()
    first, second = announce(sim, 0, b"a"), announce(sim, 1, b"b")
    assert first is not None and second is not None and first.number != second.number
    show(sim, 0, b"a")
    show(sim, 1, b"b")
    assert numbers(sim) == [None, second.number]


def test_an_image_that_is_encoded_again_is_read_again() -> None:
    """Red if a preempted request's second encode names pixels that the first one has used up."""
    sim = simulation()
    assert announce(sim, 0, b"a") is not None
    show(sim, 0, b"a")
    sim.run()
    sim.core.state.images.forget(make_request(0, [], [(0, LENGTH, b"a")], 1).images[0].hash)
    show(sim, 1, b"a")
    assert numbers(sim) == [None]


@pytest.mark.parametrize(
    ("num_pixels", "num_bytes", "is_read"),
    [(MAX_PREFETCHED_PIXELS, MAX_PREFETCHED_BYTES, True), (MAX_PREFETCHED_PIXELS + 1, 9, False), (9, MAX_PREFETCHED_BYTES + 1, False)],
)
def test_a_huge_image_waits_for_its_plan(num_pixels: int, num_bytes: int, is_read: bool) -> None:
    """Red if workers may be asked to hold more than fits beside what was planned for."""
    source = ImageSource("jpeg", Region(1, 0, num_bytes), 1, num_pixels)
    assert (simulation().core.prefetch(Upcoming(0, source)) is not None) == is_read


def test_an_image_twice_in_a_request_is_read_once() -> None:
    """Red if the plan names the bytes of the second one, which nobody has read."""
    sim = simulation()
    prompt = [1000, *[PLACEHOLDER] * LENGTH, 20, *[PLACEHOLDER] * LENGTH, 20]
    wire = make_request(0, prompt, [(1, LENGTH, b"a"), (LENGTH + 2, LENGTH, b"a")], 4, ignore_eos=True)
    first, second = wire.images
    again = msgspec.structs.replace(second, source=msgspec.structs.replace(second.source, region=Region(1, 4096, 0)))
    prefetch = sim.core.prefetch(Upcoming(0, first.source))
    assert prefetch is not None
    sim.add(msgspec.structs.replace(wire, images=[first, again]), prompt)
    assert numbers(sim) == [prefetch.number]
