"""Large images: processes that decode them, what they may take together, and pixels that are those of the worker's own arithmetic."""

import asyncio
import base64
import io
import os
import signal
from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image

from engine.messages import MediaRef
from models.kernels.reference.ops import TorchOps
from models.vision.preprocess import Preprocessor
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor import decoders
from server.processor.decoders import Budget
from server.processor.inspect import Allowance, Header
from tests.unit.server.loading import Loading
from tests.unit.server.pictures import jpeg, pixels, save

LARGE = pixels(700, 900)
SMALL_AREA = 128 * 128


def patches(checkpoint: Checkpoint, rgb: np.ndarray, grid: tuple[int, int, int]) -> torch.Tensor:  # type: ignore[type-arg]
    out = torch.empty(grid[1] * grid[2], 3 * checkpoint.geometry.patch_size**2)
    Preprocessor(checkpoint.geometry, TorchOps(), torch.device("cpu")).write_patches(torch.from_numpy(rgb.copy()), grid, out)
    return out


@pytest.mark.parametrize(("kind", "options"), [("PNG", {}), ("TIFF", {}), ("PNG", {"exif": 6}), ("JPEG", {"progressive": True, "exif": 8})])
async def test_an_image_that_is_made_smaller_here_is_the_workers(
    checkpoint: Checkpoint, loading: Loading, kind: str, options: dict[str, object]
) -> None:
    """Red if who resizes decides what the model sees, or if a turned image is made smaller the wrong way round."""
    exif = Image.Exif()
    exif[0x0112] = options.get("exif", 1)
    data = save(LARGE, kind, **{**options, "exif": exif})
    upright = Image.open(io.BytesIO(data))
    turned = {6: Image.Transpose.ROTATE_270, 8: Image.Transpose.ROTATE_90}.get(exif[0x0112])
    expected = np.asarray((upright.transpose(turned) if turned is not None else upright).convert("RGB"))
    for encoding in ("rgb", "file"):
        image = await loading.load(MediaRef(loading.body(base64.b64encode(data)).payload, max_pixels=SMALL_AREA))
        assert image.source.encoding == encoding
        if encoding == "file":
            await image.make_pixels()
        source = image.source
        assert source.height * source.width <= SMALL_AREA
        small = np.frombuffer(loading.bytes_of(image), np.uint8).reshape(source.height, source.width, 3)
        assert torch.equal(patches(checkpoint, small, image.grid), patches(checkpoint, expected, image.grid))
        await loading.release()


async def test_large_jpegs_are_no_matter_for_a_worker(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a plain JPEG of any size is decoded within a step, which everybody waits for."""
    monkeypatch.setattr("server.processor.inspect.MAX_JPEG_PIXELS", 700 * 900 - 1)
    made = Loading(checkpoint)
    assert (await made.load_bytes(jpeg(LARGE))).source.encoding == "rgb"
    assert (await made.load_bytes(jpeg())).source.encoding == "jpeg"
    await made.close()


@pytest.mark.parametrize(("is_killed", "words"), [(False, "longer than 1 s"), (True, "cannot be decoded")])
async def test_a_decoder_may_be_ended(checkpoint: Checkpoint, is_killed: bool, words: str) -> None:
    """Red if an image that takes for ever does so, if a decoder that died fails anything but its image, or if none comes in its place."""
    made = Loading(checkpoint, decode_timeout=1)
    await made.load_bytes(save(LARGE, "PNG"))
    signal_to_all(made, signal.SIGSTOP)
    loading = asyncio.create_task(made.refusal(made.body(base64.b64encode(save(pixels(701, 900), "PNG")))))
    if is_killed:
        await until(lambda: len(made.tools.decoders._pool._idle) < len(made.tools.decoders._pool._all))
        signal_to_all(made, signal.SIGSEGV)
        signal_to_all(made, signal.SIGCONT)
    error = await loading
    assert (error.info.status, words in error.info.message) == (422, True)
    assert (await made.load_bytes(save(pixels(702, 900), "PNG"))).source.encoding == "rgb"
    await made.close()


async def test_a_decoder_that_died_idle_is_no_fault_of_the_next_image(checkpoint: Checkpoint) -> None:
    """Red if a client hears that its image is bad because something else has ended the decoder."""
    made = Loading(checkpoint)
    await made.load_bytes(save(LARGE, "PNG"))
    signal_to_all(made, signal.SIGKILL)
    await until(lambda: all(helper._process is None or helper._process.returncode is not None for helper in made.tools.decoders._pool._all))
    assert (await made.load_bytes(save(pixels(702, 900), "PNG"))).source.encoding == "rgb"
    await made.close()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


def signal_to_all(made: Loading, number: signal.Signals) -> None:
    for helper in made.tools.decoders._pool._all:
        if helper._process is not None:
            os.kill(helper._process.pid, number)


async def test_who_leaves_ends_the_decoding(checkpoint: Checkpoint) -> None:
    """Red if a region is given back while a process may still write to it, or if a decoder works on for nobody."""
    made = Loading(checkpoint)
    await made.load_bytes(save(LARGE, "PNG"))
    for helper in made.tools.decoders._pool._all:
        if helper._process is not None:
            os.kill(helper._process.pid, signal.SIGSTOP)
    task = asyncio.create_task(made.load_bytes(save(pixels(701, 900), "PNG")))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await made.load_bytes(save(pixels(702, 900), "PNG"))).source.encoding == "rgb"
    await made.close()


async def test_an_image_that_could_never_be_decoded_is_a_413(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if memory that may not be used is waited for."""
    monkeypatch.setattr(decoders, "LARGE_PIXELS", 1 << 10)
    made = Loading(checkpoint, max_decode_bytes=8 * 700 * 900 - 1)
    error = await made.refusal(made.body(base64.b64encode(save(LARGE, "PNG"))))
    assert error.info.status == 413 and "memory" in error.info.message
    await made.close()


async def test_memory_is_lent_in_the_order_of_asking() -> None:
    """Red if decoders take more than the budget together, or if small ones pass a large one for ever."""
    budget, order = Budget(10), []

    async def use(name: str, amount: int) -> None:
        async with budget.lend(amount):
            order.append(name)
            await asyncio.sleep(0.01)
            order.append(f"end of {name}")

    async with asyncio.TaskGroup() as group:
        for name, amount in (("a", 6), ("b", 4), ("large", 10), ("c", 1)):
            group.create_task(use(name, amount))
    assert order == ["a", "b", "end of a", "end of b", "large", "end of large", "c", "end of c"]


async def test_the_pixels_of_a_request_are_added_up(checkpoint: Checkpoint) -> None:
    """Red if many images may have together what no single one may."""
    allowance = Allowance(100, 8)
    allowance.take(Header(True, 6, 10))
    allowance.take(Header(False, 4, 10))
    with pytest.raises(RequestError) as caught:
        allowance.take(Header(False, 1, 1))
    assert caught.value.info.status == 413
    made = Loading(checkpoint, max_request_pixels=48 * 80 - 1)
    error = await made.refusal(made.body(base64.b64encode(jpeg())))
    assert error.info.status == 413
    await made.close()
