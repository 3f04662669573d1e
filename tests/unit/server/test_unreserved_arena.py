"""Images and bodies that need more of an arena than has memory: it is reserved in small steps before it is written."""

import io
import os
from collections.abc import AsyncIterator

import numpy as np
import pytest
from PIL import Image as PillowImage

from engine import arena as module
from server.checkpoint import Checkpoint
from server.region import Region
from tests.unit.server.loading import Loading

RESIDENT, STEP = 1 << 16, 1 << 14


@pytest.fixture
async def loading(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loading]:
    monkeypatch.setattr(module, "RESIDENT_BYTES", RESIDENT)
    monkeypatch.setattr(module, "STEP_BYTES", STEP)
    running = Loading(checkpoint)
    yield running
    await running.close()


async def test_image_beyond_the_reserved_memory_is_loaded_in_steps(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if an image is written where there is no memory, or if its memory is reserved in one call of the event loop."""
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
