"""The second tier of the image directory: what leaves the device is kept in host memory, within its budget, and comes back unencoded."""

import pytest

from engine.messages import Save
from engine.scheduler.images import ImageDirectory
from tests.unit.scheduler.simulation import PLACEHOLDER, TOKEN_BYTES, make_request
from tests.unit.scheduler.test_files import LENGTH, finish, questions, show, simulation
from tests.unit.scheduler.test_prefix_in_the_making import plan

UNIT = 128  # bytes of an image in the tests of the directory; and what one of LENGTH tokens takes in host memory, rounded up


def directory(device: int, host: int) -> ImageDirectory:
    """Room for so many images of one unit on the device and on the host."""
    return ImageDirectory(device * UNIT, host * UNIT)


def encode(images: ImageDirectory, names: str) -> list[Save]:
    """Plans each image in turn, as the policy does; what was saved for them."""
    saves = []
    for name in names:
        assert images.reserve(name.encode(), UNIT) is not None
        saves += images.take_evicted()[1]
        images.check()
    return saves


def on_host(images: ImageDirectory, names: str) -> str:
    return "".join(name for name in names if name.encode() in images.host)


def test_the_image_that_left_the_device_first_is_dropped_first() -> None:
    """Red if the host keeps the older ones, or if either tier exceeds its budget."""
    images = directory(device=1, host=2)
    assert [save.host_offset for save in encode(images, "abcd")] == [0, UNIT, 0]
    assert on_host(images, "abcd") == "bc" and images.host.used_bytes == 2 * UNIT
    assert images.get(b"d") is not None and images.used_bytes == UNIT


def test_an_image_that_comes_back_keeps_its_copy() -> None:
    """Red if a second eviction copies again what the host has."""
    images = directory(device=1, host=3)
    encode(images, "ab")
    entry = images.reserve(b"a", UNIT)
    assert entry is not None and entry.host_offset == 0
    assert images.take_evicted() == ([1], [Save(1, UNIT)])
    assert encode(images, "c") == [] and on_host(images, "abc") == "ab"
    assert encode(images, "d") == [Save(3, 2 * UNIT)]


def test_the_copy_of_what_is_on_the_device_goes_first() -> None:
    """Red if restoring makes a copy younger: the device has that image, and those that are only on the host would go instead."""
    images = directory(device=2, host=3)
    encode(images, "abcde")
    assert on_host(images, "abcde") == "abc"
    assert images.reserve(b"a", UNIT) is not None and images.take_evicted()[1] == [Save(3, UNIT)]
    assert on_host(images, "abcde") == "acd", "not 'a', which is on its way"
    encode(images, "f")
    assert on_host(images, "abcdef") == "cde" and images.get(b"a") is not None


def test_what_a_plan_restores_stays_until_the_plan_is_done() -> None:
    """Red if what is evicted in the same plan takes the place of what is still to be read: workers save before they restore."""
    images = directory(device=2, host=1)
    encode(images, "abc")
    assert images.host.hold(b"a") == 0
    encoded = images.reserve(b"d", UNIT)
    assert encoded is not None and encoded.host_offset is None
    restored = images.reserve(b"a", UNIT)
    assert restored is not None and restored.host_offset == 0
    evicted, saves = images.take_evicted()
    assert len(evicted) == 2 and saves == [] and on_host(images, "abcd") == "a"
    assert encode(images, "e") == [Save(encoded.image_id, 0)], "the next plan's saves come after this plan's restores"


@pytest.mark.parametrize(("units", "offset", "kept"), [(1, 0, "abc"), (2, 0, "bc"), (4, 0, ""), (5, None, "abc")])
def test_a_large_image_takes_the_place_of_several(units: int, offset: int | None, kept: str) -> None:
    """Red if more is dropped than needed, or if what never fits drops anything."""
    images = directory(device=5, host=4)
    for name in "xabc":
        images.host.keep(name.encode(), UNIT)
    images.host.drop(b"x")
    assert images.host.keep(b"large", units * UNIT) == offset
    images.check()
    assert on_host(images, "abc") == kept


def test_holes_that_do_not_touch_are_no_room() -> None:
    """Red if fragmentation makes a save fail, overlap or loop: the oldest go until there is one hole, held ones stay, or it is not kept."""
    images = directory(device=1, host=4)
    for name in "abcda":  # "a" left twice: it is the youngest
        images.host.keep(name.encode(), UNIT)
    images.host.drop(b"c")
    assert images.host.keep(b"e", 2 * UNIT) == UNIT
    images.check()
    assert on_host(images, "abcde") == "ade"
    images.host.hold(b"e")
    assert images.host.keep(b"f", 3 * UNIT) is None
    images.check()
    assert b"e" in images.host


def test_without_a_budget_there_is_no_second_tier() -> None:
    """Red if the tier is not off by default."""
    images = ImageDirectory(UNIT)
    assert encode(images, "abc") == [] and on_host(images, "abc") == "" and images.num_evicted == 2


def test_pinned_images_stay_on_the_device() -> None:
    """Red if an embedding is saved and given away while a request reads it."""
    images = directory(device=2, host=4)
    encode(images, "ab")
    images.pin(b"a")
    images.pin(b"b")
    assert images.reserve(b"c", UNIT) is None and images.take_evicted() == ([], [])
    images.unpin(b"b")
    assert encode(images, "c") == [Save(1, 0)]


def test_an_image_that_comes_back_is_neither_encoded_nor_decoded() -> None:
    """Red if a restored image takes encoder budget or pixels, or is counted as encoded or as a hit."""
    sim = simulation(image_tokens=2 * LENGTH, host_bytes=4 * UNIT, max_num_encoder_tokens=LENGTH)
    show(sim, 0, b"ab", files=False)
    show(sim, 1, b"cd", files=False)
    sim.run()
    show(sim, 2, b"ba")
    step = plan(sim)
    assert [len(part) for part in (step.plan.saves, step.plan.evict, step.plan.restores, step.plan.encodes)] == [2, 2, 2, 0]
    sim.run()
    counters = sim.core.state.counters
    assert not sim.asked and (counters.images_encoded, counters.images_restored, counters.images_hit) == (4, 2, 0)


def test_a_chunk_keeps_the_copies_that_it_needs_from_its_own_evictions() -> None:
    """Red if making room for one image of a chunk pushes out the copy of its next one, a file whose pixels nobody asked for."""
    sim = simulation(image_tokens=2 * LENGTH, host_bytes=UNIT, prefix_cache=False)
    show(sim, 0, b"a", files=False)
    sim.run()
    show(sim, 1, b"bc", files=False)
    sim.run()
    assert sim.core.state.images.knows(sim.sequences[0].wire.images[0].hash)
    prompt, images = [40], [(1, LENGTH, b"z"), (1 + LENGTH, LENGTH, b"a")]
    prompt += [PLACEHOLDER] * 2 * LENGTH + [20]
    sim.add(make_request(2, prompt, images, 2, files=[1]), prompt)
    step = plan(sim)
    assert (len(step.plan.encodes), len(step.plan.restores), step.plan.saves) == (1, 1, [])
    finish(sim)
    assert not sim.asked


def test_a_file_whose_copy_was_dropped_while_it_waited_is_asked_for() -> None:
    """Red if a request counts on a copy for ever: what it had not reached was dropped by others."""
    sim = simulation(image_tokens=2 * LENGTH, host_bytes=3 * UNIT, max_num_batched_tokens=10, max_num_mixed_tokens=10)
    show(sim, 0, b"abcd", files=False, max_tokens=1)
    sim.run()
    show(sim, 1, b"ab")
    plan(sim)
    request = sim.core.state.running[0]
    assert not sim.asked and request.images[1].hash in sim.core.state.images.host
    sim.core.state.images.host.drop(request.images[1].hash)
    while sim.step():
        pass
    assert questions(sim) == [(1, 1)]
    finish(sim)
    assert sim.terminal[1] == "length"


def test_an_image_that_failed_is_forgotten_by_both_tiers() -> None:
    """Red if an embedding of zeros comes back: its image was evicted, and saved, before it was known that the encode had failed."""
    sim = simulation(image_tokens=LENGTH, host_bytes=8 * UNIT, max_num_seqs=2)
    show(sim, 0, b"a", files=False)
    digest = sim.sequences[0].wire.images[0].hash
    sim.bad_images = {digest}
    first = sim.core.next_step()
    assert first is not None
    sim.in_flight.append((first, sim.worker.execute(first, sim.sequences), list(first.made)))
    show(sim, 1, b"b", files=False)
    second = sim.core.next_step()
    assert second is not None and len(second.plan.saves) == 1 and digest in sim.core.state.images.host
    sim.in_flight.append((second, sim.worker.execute(second, sim.sequences), []))
    sim.run()
    assert sim.terminal == {0: "error", 1: "length"} and not sim.core.state.images.knows(digest)
    sim.bad_images = set()
    show(sim, 2, b"a", files=False)
    sim.run()
    assert sim.worker.num_encoded[digest] == 2 and sim.core.state.counters.images_restored == 0


def test_images_that_do_not_fit_on_the_device_are_encoded_once() -> None:
    """Red if copies are lost on the way: images come again and again, in an order in which the device never has the next one."""
    sim = simulation(image_tokens=2 * LENGTH, host_bytes=8 * UNIT, prefix_cache=False)
    for rid in range(32):
        show(sim, rid, bytes([rid % 8]), files=False)
        sim.run()
    counters = sim.core.state.counters
    assert set(sim.worker.num_encoded.values()) == {1} and counters.images_restored == 24
    assert sim.core.state.images.host.used_bytes == 8 * LENGTH * TOKEN_BYTES
