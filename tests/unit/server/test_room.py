"""Requests that wait for memory of the processor's arena."""

import asyncio
from collections.abc import Callable

import pytest

from engine.arena import Arena, ArenaFull, create_memfd
from server.processor.room import TIMEOUT_S, Room
from tests.unit.server.in_process import settle, virtual

SIZE = 1 << 16


def make(is_shared: Callable[[], bool] = lambda: True) -> Room:
    return Room(Arena(create_memfd("test", SIZE), SIZE), is_shared)


@virtual
async def test_memory_that_is_given_back_is_taken() -> None:
    room = make()
    held = [room.take(SIZE // 2), room.take(SIZE // 2)]
    waiting = asyncio.create_task(room.take_patiently(SIZE))
    for region in held:
        await settle()
        assert not waiting.done()
        room.give_back(region)
    room.give_back(await waiting)


@virtual
async def test_the_wait_ends() -> None:
    room, loop = make(), asyncio.get_running_loop()
    held, started = room.take(SIZE // 2), loop.time()
    waiting = asyncio.create_task(room.take_patiently(SIZE))
    while loop.time() < started + TIMEOUT_S - 0.5:
        assert not waiting.done()
        room.give_back(room.take(1))
        await asyncio.sleep(0.4)
    await asyncio.sleep(1)
    assert isinstance(waiting.exception(), ArenaFull)
    room.give_back(held)


@virtual
async def test_a_request_that_is_alone_does_not_wait() -> None:
    room, loop = make(is_shared=lambda: False), asyncio.get_running_loop()
    held, started = room.take(SIZE), loop.time()
    with pytest.raises(ArenaFull):
        await room.take_patiently(SIZE)
    assert loop.time() == started
    room.give_back(held)


@virtual
async def test_a_cancelled_request_takes_nothing() -> None:
    room = make()
    held = room.take(SIZE)
    waiting = asyncio.create_task(room.take_patiently(SIZE))
    await settle()
    waiting.cancel()
    await asyncio.wait([waiting])
    room.give_back(held)
    room.give_back(room.take(SIZE))
