"""Decoders that are killed, and small files that would keep one busy for long, or make it allocate much."""

import asyncio
import base64
import functools
import os
import resource
import signal
import struct
import sys
import zlib
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from PIL import Image

from engine.wire.arena import ArenaView, create_memfd
from engine.wire.jpeg import parse_plain_jpeg
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.decoder import answer
from server.processor.media.decoders import Job, Limits
from tests.eventually import HANG_GUARD_S, eventually_async
from tests.unit.server.loading import Loading
from tests.unit.server.pictures import DECODED, animation, jpeg, pixels, png_chunk, png_header, save


def num_lines(work: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


async def test_fill_bytes_cost_no_steps(loading: Loading) -> None:
    """Fails if the header is walked byte by byte in Python."""
    data = jpeg()
    filled = data[:2] + b"\xff" * 50_000 + data[2:]
    assert num_lines(lambda: parse_plain_jpeg(memoryview(filled))) <= num_lines(lambda: parse_plain_jpeg(memoryview(data))) + 10
    assert (await loading.load_bytes(filled)).source.encoding == "jpeg"


def test_a_job_has_its_own_time() -> None:
    data = DECODED["png"]
    arena = ArenaView(create_memfd("test", len(data)), len(data), writable=True)
    arena.view(0, len(data))[:] = data
    limits = resource.getrlimit(resource.RLIMIT_CPU)
    assert answer(arena, Job((0, len(data))), Limits(1, 1, 1, 1)) == (48, 80, 1)
    assert resource.getrlimit(resource.RLIMIT_CPU) == limits
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)


def png_with(*chunks: bytes, behind: bytes = b"") -> bytes:
    data = save(pixels(), "PNG")
    return data[:33] + b"".join(chunks) + data[33:-12] + behind + data[-12:]


def bmp_of_runs() -> bytes:
    runs = b"\x01\x00" * (1 << 20)
    info = struct.pack("<IiiHHIIiiII", 40, 1024, 1024, 1, 8, 1, len(runs), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 1078 + len(runs), 0, 0, 1078) + info + bytes(1024) + runs


def tiff_of_tags(count: int = 60_000) -> bytes:
    tags = b"".join(struct.pack("<HHII", tag, 3, 9, 1 << 31) for tag in range(1000, 1000 + count))
    return b"II*\0" + struct.pack("<IH", 8, count) + tags + bytes(4)


@functools.cache
def bomb() -> bytes:
    return zlib.compress(bytes(300 << 20))


HOSTILE = {
    "a PNG of very many chunks": (lambda: png_with(png_chunk(b"tEsT") * 450_000), (200, 422)),
    "a BMP of runs": (bmp_of_runs, (200, 422)),
    "a TIFF of very many tags": (tiff_of_tags, (422,)),
    "compressed texts of gigabytes": (lambda: png_with(*[png_chunk(b"zTXt", b"a\0\0" + bomb())] * 10), (200, 422)),
    "a PNG of 2**15 squared": (lambda: png_header(1 << 15, 1 << 15), (400,)),
    "an animated WebP": (lambda: animation("WEBP", 200), (200,)),
}
IN_GATE = ("a TIFF of very many tags", "a PNG of 2**15 squared")


@pytest.mark.hostile
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.gate] * (name in IN_GATE)) for name in HOSTILE])
async def test_what_is_dear_to_read_costs_no_other(
    checkpoint: Checkpoint, name: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fails if such a file is opened in the processor, delays a good picture, or fills the log."""
    make, expected = HOSTILE[name]
    data, statuses = make(), []
    loading = Loading(checkpoint)
    loading.decoders._timeout = int(HANG_GUARD_S)
    pool = loading.decoders.pool
    monkeypatch.setattr(Image, "open", None)  # decoders are other processes
    processes = [(await guest.start()).pid for guest in pool.guests]
    text = base64.b64encode(data)

    async def load() -> None:
        try:
            await loading.load(loading.body(text))
            statuses.append(200)
        except RequestError as error:
            statuses.append(error.info.status)

    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(load())
    await eventually_async(lambda: len(pool.idle) == 1, "the file in a decoder")
    (other,) = (guest.process.pid for guest in pool.idle if guest.process is not None)
    os.kill(other, signal.SIGCONT)
    await loading.load_bytes(DECODED["webp"])
    assert not task.done()
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    await task
    assert statuses[0] in expected
    await loading.close()
    assert len(capfd.readouterr().err) < 1000
