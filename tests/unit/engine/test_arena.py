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

MIB = 1 << 20
SMALL = 64 * ALIGNMENT
SIZE, RESIDENT, STEP = 8 * MIB, MIB, MIB // 2


def operate(arena: Arena, rng: random.Random, unit: int, count: int) -> None:
    """Check after each random operation that regions have their bytes, and memory under them."""
    model: dict[int, bytes] = {}
    for _ in range(count):
        action = rng.choice(["alloc", "alloc", "free", "grow", "shrink", "trim"])
        if action == "trim":
            arena.trim()
        elif action == "alloc":
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
        arena.check()
        assert all(bytes(arena.view(offset, len(data))) == data for offset, data in model.items())
        assert not model or memory_of(arena) >= max(arena._allocated.values())
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

    def fail(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "no space")

    held = arena.alloc(1000)
    monkeypatch.setattr(os, "posix_fallocate", fail)
    for act in (lambda: arena.alloc(2 * MIB), lambda: arena.grow(held, 1000, 2 * MIB)):
        with pytest.raises(ArenaFull):
            act()
        arena.check()
        assert arena._allocated.keys() == {held}
    assert arena.alloc(1000) != held  # small ones still fit
    monkeypatch.undo()
    assert arena.grow(held, 1000, 1024) == held


def test_memory_is_given_back_at_idle_only(arena: Arena) -> None:
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
    operate(arena, random.Random(0), MIB // 6, 500)
