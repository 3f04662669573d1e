"""Large images: processes that decode them, and memory of the arenas: who waits for it, regions that grow."""

import asyncio
import base64
import io
import itertools
import os
import signal
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.wire.arena import ArenaFull, ArenaTooSmall, create_memfd
from engine.wire.messages import MediaRef
from models.kernels.reference.ops import TorchOps
from models.vision.preprocess import Preprocessor
from server.checkpoint import Checkpoint
from server.processor.media.sources import RegionAllocator
from tests.eventually import HANG_GUARD_S, eventually_async
from tests.unit.server.in_process import settle, virtual
from tests.unit.server.loading import Loading
from tests.unit.server.pictures import jpeg, pixels, save

LARGE = pixels(700, 900)
SMALL_AREA = 128 * 128


def patches(checkpoint: Checkpoint, rgb: np.ndarray, grid: tuple[int, int, int]) -> torch.Tensor:
    out = torch.empty(grid[1] * grid[2], 3 * checkpoint.model.geometry.patch_size**2)
    Preprocessor(checkpoint.model.geometry, TorchOps(), torch.device("cpu")).write_patches(torch.from_numpy(rgb.copy()), grid, out)
    return out


async def test_an_image_that_is_made_smaller_here_is_the_workers(checkpoint: Checkpoint, loading: Loading) -> None:
    for kind, orientation, options in (("PNG", 1, {}), ("TIFF", 1, {}), ("PNG", 6, {}), ("JPEG", 8, {"progressive": True})):
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = save(LARGE, kind, **options, exif=exif)
        upright = Image.open(io.BytesIO(data))
        turned = {6: Image.Transpose.ROTATE_270, 8: Image.Transpose.ROTATE_90}.get(orientation)
        expected = np.asarray((upright.transpose(turned) if turned is not None else upright).convert("RGB"))
        image = await loading.load(MediaRef(loading.body(base64.b64encode(data)).payload, max_pixels=SMALL_AREA))
        source = image.source
        assert source.height * source.width <= SMALL_AREA
        small = np.frombuffer(loading.bytes_of(image), np.uint8).reshape(source.height, source.width, 3)
        assert torch.equal(patches(checkpoint, small, image.grid), patches(checkpoint, expected, image.grid)), (kind, orientation)
        await loading.release()


async def test_large_jpegs_are_no_matter_for_a_worker(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.processor.media.image.MAX_JPEG_PIXELS", 700 * 900 - 1)
    made = Loading(checkpoint)
    assert (await made.load_bytes(jpeg(LARGE))).source.encoding == "file"
    assert (await made.load_bytes(jpeg())).source.encoding == "jpeg"
    await made.close()


async def test_a_decoder_may_end_at_any_time(checkpoint: Checkpoint) -> None:
    """Fails if a decoder that hangs, crashes, ends while idle, or works for a client that left, harms another image."""
    made = Loading(checkpoint)
    made.decoders._timeout = int(HANG_GUARD_S)
    decoders, pool = made.decoders, made.decoders.pool
    heights = itertools.count(700)  # known images are not decoded again

    def new_image() -> MediaRef:
        return made.body(base64.b64encode(save(pixels(next(heights), 900), "PNG")))

    def send(number: signal.Signals) -> None:
        for guest in pool.guests:
            if guest.process is not None:
                os.kill(guest.process.pid, number)

    async def check_and_stop() -> None:
        decoders._timeout = int(HANG_GUARD_S)
        assert (await made.load(new_image())).source.encoding == "file"
        await made.release()
        send(signal.SIGSTOP)

    async def ask(work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = asyncio.create_task(work)
        await eventually_async(lambda: len(pool.idle) < len(pool.guests), "a job of the stopped decoder")
        return task

    await check_and_stop()
    decoders._timeout = 1
    error = await made.refusal(new_image())
    assert (error.info.status, "longer than 1 s" in error.info.message) == (422, True)
    await check_and_stop()
    refusal = await ask(made.refusal(new_image()))
    send(signal.SIGSEGV)
    send(signal.SIGCONT)
    error = await refusal
    assert (error.info.status, "crashed on it" in error.info.message) == (422, True)
    await check_and_stop()
    send(signal.SIGKILL)
    ended = [guest.process for guest in pool.guests if guest.process is not None]
    await eventually_async(lambda: all(process.returncode is not None for process in ended), "the end of the decoders")
    await check_and_stop()
    left = await ask(made.load(new_image()))
    left.cancel()
    send(signal.SIGCONT)
    with pytest.raises(asyncio.CancelledError):
        await left
    await check_and_stop()
    await made.close()


SIZE = 1 << 16


def make() -> RegionAllocator:
    return RegionAllocator(create_memfd("test", SIZE), SIZE)


@virtual
async def test_pixels_wait_for_memory_in_order() -> None:
    allocator = make()
    with pytest.raises(ArenaTooSmall):
        await allocator.reserve(SIZE // 2 + 1)
    inputs = allocator.allocate(SIZE // 2)
    with pytest.raises(ArenaFull):
        allocator.allocate(1)
    held = await allocator.reserve(SIZE // 4)
    large, small = asyncio.create_task(allocator.reserve(SIZE // 2)), asyncio.create_task(allocator.reserve(1))
    await settle()
    assert not large.done() and not small.done()
    allocator.free(held)
    allocator.free(await large)
    allocator.free(await small)
    allocator.free(inputs)
    assert allocator.is_empty()
