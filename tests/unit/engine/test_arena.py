"""The arena against a brute-force model of bytes."""

import contextlib
import mmap
import os
import random
import resource

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire.arena import ALIGNMENT, Arena, ArenaFull, ArenaTooSmall, ArenaView, create_memfd
from tests.unit.engine.arenas import check_arena

MIB = 1 << 20
SMALL = 64 * ALIGNMENT
SIZE = 8 * MIB


def operate(arena: Arena, rng: random.Random, unit: int, count: int) -> None:
    model: dict[int, bytes] = {}
    for _ in range(count):
        action = rng.choice(["alloc", "alloc", "free", "grow", "shrink"])
        if action == "alloc":
            length = rng.randint(1, 12 * unit)
            with contextlib.suppress(ArenaFull):
                offset = arena.alloc(length)
                model[offset] = rng.randbytes(min(length, 12 * ALIGNMENT))
                arena.view(offset, len(model[offset]))[:] = model[offset]
        elif model:
            offset = rng.choice(list(model))
            data = model.pop(offset)
            if action == "free":
                arena.free(offset)
                continue
            if action == "shrink":
                data = data[: rng.randint(0, len(data))]
                arena.shrink(offset, len(data))
            else:
                length = rng.randint(0, 6 * unit)
                with contextlib.suppress(ArenaFull):
                    offset = arena.grow(offset, len(data), len(data) + length)
                    assert bytes(arena.view(offset, len(data))) == data
                    data += rng.randbytes(min(length, 6 * ALIGNMENT))
                    arena.view(offset, len(data))[:] = data
            model[offset] = data
        check_arena(arena)
        assert all(bytes(arena.view(offset, len(data))) == data for offset, data in model.items())
    for offset in model:
        arena.free(offset)
    assert arena.is_empty() and arena.alloc(arena.size) == 0


@given(seed=st.integers(0, 10**9))
def test_any_sequence_of_operations(seed: int) -> None:
    operate(make(), random.Random(seed), ALIGNMENT, 120)


def make() -> Arena:
    return Arena(create_memfd("test", SMALL), SMALL)


def test_refusals() -> None:
    arena = make()
    with pytest.raises(ArenaTooSmall):
        arena.alloc(SMALL + 1)
    first = arena.alloc(SMALL)
    with pytest.raises(ArenaFull):
        arena.alloc(1)
    arena.free(first)
    with pytest.raises(KeyError):
        arena.free(first)
    with pytest.raises(IndexError):
        arena.view(SMALL - 1, 2)


def test_a_view_in_another_mapping_sees_the_bytes() -> None:
    fd = create_memfd("test", SIZE)
    arena = Arena(fd, SIZE)
    offset = arena.alloc(5)
    arena.view(offset, 5)[:] = b"bytes"
    assert bytes(ArenaView(fd, SIZE).view(offset, 5)) == b"bytes"


def test_all_memory_is_reserved_and_mapped() -> None:
    """A write where there is no memory ends the process, and the first access to a page takes microseconds."""
    arena = Arena(create_memfd("test", SIZE), SIZE)
    assert os.fstat(arena.fd).st_blocks * 512 == SIZE
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for start in range(0, SIZE, mmap.PAGESIZE):
        arena.buffer[start] = 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < SIZE // mmap.PAGESIZE // 4
