"""The arena against a brute-force model of bytes; its memory is reserved before use and given back when the arena is empty."""

import asyncio
import contextlib
import os
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.wire import arena as module
from engine.wire.arena import ALIGNMENT, Arena, ArenaFull, ArenaTooSmall, ArenaView, create_memfd

SIZE = 64 * ALIGNMENT


def make() -> Arena:
    return Arena(create_memfd("test", SIZE), SIZE)


@given(seed=st.integers(0, 10**9))
def test_any_sequence_of_operations(seed: int) -> None:
    rng, arena = random.Random(seed), make()
    model = {}
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


MIB = 1 << 20
SIZE, RESIDENT, STEP = 8 * MIB, MIB, MIB // 2


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Arena:
    monkeypatch.setattr(module, "RESIDENT_BYTES", RESIDENT)
    monkeypatch.setattr(module, "STEP_BYTES", STEP)
    return Arena(create_memfd("test", SIZE), SIZE)


def memory_of(arena: Arena) -> int:
    return os.fstat(arena.fd).st_blocks * 512


def test_idle_engine_holds_at_most_300_mib() -> None:
    assert 2 * module.RESIDENT_BYTES <= 300 * MIB


def test_memory_is_reserved_before_it_is_written(arena: Arena) -> None:
    """A write where there is no memory ends the process."""
    assert memory_of(arena) == RESIDENT
    first = arena.alloc(RESIDENT)
    assert memory_of(arena) == RESIDENT
    second = arena.alloc(3 * MIB)
    assert memory_of(arena) >= second + 3 * MIB
    assert arena.grow(second, 0, 5 * MIB) == second and memory_of(arena) >= second + 5 * MIB
    for offset in (first, second):
        arena.free(offset)
    assert arena.alloc(SIZE) == 0 and memory_of(arena) == SIZE


def test_lack_of_memory_is_a_full_arena(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """No region is lost."""

    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "no space")

    held = arena.alloc(1000)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    for act in (lambda: arena.alloc(2 * MIB), lambda: arena.grow(held, 1000, 2 * MIB)):
        with pytest.raises(ArenaFull):
            act()
        arena.check()
        assert arena.offsets() == {held}
    assert arena.alloc(1000) != held  # small ones still fit
    monkeypatch.undo()
    assert arena.grow(held, 1000, 1024) == held


def test_memory_is_given_back_at_idle_only(arena: Arena) -> None:
    """Little at once, and never that of a region."""
    regions = [arena.alloc(2 * MIB) for _ in range(3)]
    arena.view(regions[2], 4)[:] = b"data"
    for region in regions[:2]:
        arena.free(region)
    arena.trim()
    assert memory_of(arena) == 6 * MIB and bytes(arena.view(regions[2], 4)) == b"data"
    arena.free(regions[2])
    held = [memory_of(arena)]
    while held[-1] > RESIDENT:
        arena.trim()
        held.append(memory_of(arena))
        assert STEP >= held[-2] - held[-1] > 0
    arena.trim()
    assert memory_of(arena) == RESIDENT


async def test_large_reservations_let_the_event_loop_go_on(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if one region's memory is reserved at once."""
    reserved = []
    real, turns = os.posix_fallocate, 0
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: (reserved.append(length), real(fd, offset, length)))

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    await arena.prepare(5 * MIB)
    region = arena.alloc(5 * MIB)
    counting.cancel()
    assert max(reserved) <= STEP and turns >= len(reserved) - 1 >= 7
    await arena.prepare(7 * MIB, region)
    assert arena.grow(region, 0, 7 * MIB) == region and max(reserved) <= STEP
    assert not arena.has_memory(2 * SIZE) or arena.find(2 * SIZE) is None


def test_any_sequence_keeps_memory_under_every_region(arena: Arena) -> None:
    rng = random.Random(0)
    held = {}
    for _ in range(2000):
        action = rng.choice(["alloc", "alloc", "free", "free", "grow", "trim"])
        if action == "trim":
            arena.trim()
        elif action == "alloc":
            try:
                offset = arena.alloc(rng.randint(1, 2 * MIB))
            except ArenaFull:
                continue
            held[offset] = rng.randbytes(8)
            arena.view(offset, 8)[:] = held[offset]
        elif held:
            offset = rng.choice(list(held))
            data = held.pop(offset)
            assert bytes(arena.view(offset, 8)) == data
            if action == "free":
                arena.free(offset)
                continue
            with contextlib.suppress(ArenaFull):
                offset = arena.grow(offset, 8, rng.randint(8, 3 * MIB))
            held[offset] = data
        if held:
            assert memory_of(arena) >= max(arena._allocated.values())
