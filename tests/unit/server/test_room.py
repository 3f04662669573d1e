"""Whoever has to wait for room, and for how long. Red if somebody waits for ever, for nobody, or is not woken."""

import asyncio
import time

import pytest

from engine.arena import Arena, ArenaFull, create_memfd
from server.processor import room as room_module
from server.processor.room import Room

SIZE = 1 << 16


def make(is_shared: bool = True) -> Room:
    return Room(Arena(create_memfd("test", SIZE), SIZE), lambda: is_shared)


async def test_room_that_came_is_taken() -> None:
    """Also if what came first was not enough."""
    room = make()
    held = [room.take(SIZE // 2), room.take(SIZE // 2)]
    waiting = asyncio.create_task(room.take_patiently(SIZE))
    for region in held:
        await asyncio.sleep(0.01)
        assert not waiting.done()
        room.give_back(region)
    room.give_back(await waiting)


async def test_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if room comes again and again, but never enough."""
    monkeypatch.setattr(room_module, "TIMEOUT_S", 0.2)
    room = make()
    held = room.take(SIZE // 2)
    waiting = asyncio.create_task(room.take_patiently(SIZE))
    start = time.monotonic()
    while not waiting.done() and time.monotonic() < start + 2:
        room.give_back(room.take(1))
        await asyncio.sleep(0.01)
    assert isinstance(waiting.exception(), ArenaFull) and time.monotonic() - start < 1
    room.give_back(held)


async def test_nobody_waits_who_is_alone() -> None:
    room = make(is_shared=False)
    held = room.take(SIZE)
    start = time.monotonic()
    with pytest.raises(ArenaFull):
        await room.take_patiently(SIZE)
    assert time.monotonic() - start < 1
    room.give_back(held)


async def test_one_that_is_cancelled_takes_nothing() -> None:
    room = make()
    held = room.take(SIZE)
    waiting = asyncio.create_task(room.take_patiently(SIZE))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    room.give_back(held)
    room.give_back(room.take(SIZE))
