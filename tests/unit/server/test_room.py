"""Memory of the arenas: requests that wait for it, regions that grow, and reservation in small steps."""

import asyncio
import io
import os
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from PIL import Image as PillowImage

from engine import arena as module
from engine.arena import Arena, ArenaFull, create_memfd
from server.checkpoint import Checkpoint
from server.processor.room import TIMEOUT_S, Room
from server.region import MIN_GROWTH, Region
from tests.unit.server.in_process import settle, virtual
from tests.unit.server.loading import Loading

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


def test_what_fits_is_had_although_twice_as_much_does_not() -> None:
    """Red if a body is turned away because the room that growing takes ahead does not fit."""
    size = 8 * MIN_GROWTH
    arena = Arena(create_memfd("test", size), size)
    region = Region(arena, 2 * MIN_GROWTH)
    region.append(b"x" * region.capacity)
    neighbour = arena.alloc(5 * MIN_GROWTH // 2)  # 3.5 units remain: less than twice the region, more than it needs
    region.append(b"y")
    assert bytes(region.view[-2:]) == b"xy" and region.used == 2 * MIN_GROWTH + 1
    region.free()
    arena.free(neighbour)
    arena.check()
    assert arena.is_empty()


RESIDENT, STEP = 1 << 16, 1 << 14


@pytest.fixture
async def loading(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loading]:
    monkeypatch.setattr(module, "RESIDENT_BYTES", RESIDENT)
    monkeypatch.setattr(module, "STEP_BYTES", STEP)
    running = Loading(checkpoint)
    yield running
    await running.close()


async def test_image_beyond_the_reserved_memory_is_loaded_in_steps(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[int] = []
    reserve = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: (steps.append(length), reserve(fd, offset, length)))
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), np.uint8)
    file = io.BytesIO()
    PillowImage.fromarray(pixels).save(file, "PNG")
    image = await loading.load_bytes(file.getvalue())
    assert loading.bytes_of(image) == pixels.tobytes()
    memory = os.fstat(loading.arena_fd).st_blocks * 512
    assert memory >= image.source.region.offset + image.source.region.length > RESIDENT
    assert len(steps) > 2 and max(steps) <= STEP


async def test_growing_region_is_prepared_in_steps(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a body of unknown length stops the event loop whenever its region doubles."""
    steps: list[int] = []
    reserve = os.posix_fallocate
    monkeypatch.setattr(os, "posix_fallocate", lambda fd, offset, length: (steps.append(length), reserve(fd, offset, length)))
    region, piece = Region(loading.arena, 1024), bytes(range(256)) * 64
    for _ in range(100):
        await region.prepare(len(piece))
        region.append(piece)
    assert region.view.tobytes() == piece * 100 and len(steps) > 2 and max(steps) <= STEP
    region.free()
