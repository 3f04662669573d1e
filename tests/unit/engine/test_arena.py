"""The arena against a brute-force model of bytes: no overlap, no loss, everything comes back."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.arena import ALIGNMENT, Arena, ArenaFull, ArenaTooSmall, ArenaView, create_memfd

SIZE = 64 * ALIGNMENT


def make() -> Arena:
    return Arena(create_memfd("test", SIZE), SIZE)


@given(seed=st.integers(0, 10**9))
def test_any_sequence_of_operations(seed: int) -> None:
    """Red if two regions overlap, if grow or a move loses bytes, or if free ranges are not merged."""
    rng, arena = random.Random(seed), make()
    model: dict[int, bytes] = {}
    for _ in range(120):
        action = rng.choice(["alloc", "alloc", "free", "grow", "shrink"])
        if action == "alloc":
            length = rng.randint(1, 12 * ALIGNMENT)
            try:
                offset = arena.alloc(length)
            except ArenaFull:
                continue
            model[offset] = rng.randbytes(length)
            arena.view(offset, length)[:] = model[offset]
        elif model:
            offset = rng.choice(list(model))
            data = model.pop(offset)
            if action == "free":
                arena.free(offset)
            elif action == "shrink":
                data = data[: rng.randint(0, len(data))]
                arena.shrink(offset, len(data))
                model[offset] = data
            else:
                length = len(data) + rng.randint(0, 6 * ALIGNMENT)
                try:
                    offset = arena.grow(offset, len(data), length)
                except ArenaFull:
                    length = len(data)
                data = data + rng.randbytes(length - len(data))
                arena.view(offset, length)[:] = data
                model[offset] = data
        arena.check()
        for start, expected in model.items():
            assert bytes(arena.view(start, len(expected))) == expected
    for offset in model:
        arena.free(offset)
    arena.check()
    assert arena.is_empty() and arena.alloc(SIZE) == 0


def test_refusals() -> None:
    """A size that never fits is told from one that does not fit now; a double free is noticed."""
    arena = make()
    with pytest.raises(ArenaTooSmall):
        arena.alloc(SIZE + 1)
    first = arena.alloc(SIZE)
    with pytest.raises(ArenaFull):
        arena.alloc(1)
    arena.free(first)
    with pytest.raises(KeyError):
        arena.free(first)
    with pytest.raises(IndexError):
        arena.view(SIZE - 1, 2)


def test_a_view_in_another_mapping_sees_the_bytes() -> None:
    fd = create_memfd("test", SIZE)
    arena = Arena(fd, SIZE)
    offset = arena.alloc(5)
    arena.view(offset, 5)[:] = b"bytes"
    assert bytes(ArenaView(fd, SIZE).view(offset, 5)) == b"bytes"
