"""Names of KV blocks: what they tell apart, and that taking them over from an ended request changes nothing."""

import numpy as np

from engine.scheduler.blocks import BlockHasher, BlockPool
from tests.unit.scheduler.invariants import check_blocks
from tests.unit.scheduler.simulation import PLACEHOLDER, make_request

BLOCK = 4
PROMPT = [20, 21, *[PLACEHOLDER] * 9, 22, 23, *[PLACEHOLDER] * 6, 24, 25, 26]
IMAGES = [(2, 9, b"a"), (13, 6, b"b")]


def links(prompt: list[int] = PROMPT, images: list[tuple[int, int, bytes]] = IMAGES) -> list[bytes]:
    hasher = BlockHasher(BLOCK, make_request(0, prompt, images, 1).images, ("", b""))
    hasher.extend(np.asarray(prompt, dtype=np.int32))
    return hasher.links


def num_equal(other: list[bytes]) -> int:
    equal = [a == b for a, b in zip(links(), other, strict=True)]
    assert equal == sorted(equal, reverse=True)
    return sum(equal)


def test_a_block_is_named_after_all_that_is_before_its_end() -> None:
    for position in range(len(PROMPT)):
        assert num_equal(links([*PROMPT[:position], 30, *PROMPT[position + 1 :]])) == min(position // BLOCK, len(PROMPT) // BLOCK), position


def test_blocks_inside_an_image_are_named_after_it() -> None:
    for changed in range(2):
        images = [(start, length, b"c" if i == changed else name) for i, (start, length, name) in enumerate(IMAGES)]
        assert num_equal(links(images=images)) == images[changed][0] // BLOCK


def test_the_place_of_an_image_in_its_block_is_part_of_the_name() -> None:
    prompt = [PLACEHOLDER] * 12
    assert not set(links(prompt, [(0, 6, b"a"), (6, 6, b"b")])[1:]) & set(links(prompt, [(0, 7, b"a"), (7, 5, b"b")])[1:])
    assert not set(links(prompt, [(0, 12, b"a")])) & set(links(prompt, [(1, 11, b"a")]))


def test_names_do_not_depend_on_how_they_are_made() -> None:
    ids = np.asarray(PROMPT, dtype=np.int32)
    for cut in range(len(PROMPT)):
        hasher = BlockHasher(BLOCK, make_request(0, PROMPT, IMAGES, 1).images, ("", b""))
        hasher.extend(ids[:cut])
        assert list(hasher.chain(ids, len(PROMPT) // BLOCK)) == links()


def test_snapshots_keep_to_their_share() -> None:
    pool = BlockPool(12, 16, snapshot_share=0.5)
    for name in (b"a", b"b", b"c"):
        blocks = pool.alloc(2)
        assert blocks is not None
        pool.commit_snapshot(blocks, name)
    assert pool.snapshot(b"a")
    blocks = pool.alloc(2)
    assert blocks is not None
    pool.commit_snapshot(blocks, b"d")
    assert [bool(pool.snapshot(name)) for name in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    check_blocks(pool)
    assert pool.num_free == 12
