"""Embeddings that go to pinned host memory and come back on the GPU: the host never waits, and no copy overtakes what it depends on."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.messages import Restore, Save
from engine.worker.images import ImageCache
from engine.worker.memory import allocate_host
from models.parallel.group import TensorParallel

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

LEVELS, TOKENS, WIDTH = 4, 880, 4096
NUM_BYTES = LEVELS * TOKENS * WIDTH * 2
BUSY_CYCLES = 500_000_000  # about a quarter of a second


def cache_of(stream: torch.cuda.Stream, num_images: int) -> ImageCache:
    config = SimpleNamespace(num_visual_levels=LEVELS, text=SimpleNamespace(hidden_size=WIDTH))
    tower: Any = SimpleNamespace(config=config, dtype=torch.bfloat16, device=stream.device)
    reader: Any = None
    return ImageCache(tower, reader, TensorParallel.single(), stream, allocate_host(num_images * NUM_BYTES, stream.device))


def test_copies_behind_a_busy_device_are_right() -> None:
    """Red if a save reads memory that is in use again, if a region is overwritten before it is read, or if the host waits for a copy.

    The tower's stream is busy when the plans come, so that everything below is enqueued before any of it runs.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    stream = torch.cuda.Stream(device)
    cache = cache_of(stream, 2)
    images = torch.randn(4, LEVELS, TOKENS, WIDTH, device=device).to(torch.bfloat16)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        cache.tensors = {i: images[i].clone() for i in range(3)}
        torch.cuda._sleep(BUSY_CYCLES)
    end = torch.cuda.Event()
    end.record()
    cache.note_use([0, 1, 2], end)
    cache.save([Save(0, 0), Save(1, NUM_BYTES)])
    cache.evict([0, 1])
    with torch.cuda.stream(stream):
        reused = [images[3].clone() for _ in range(2)]  # takes the memory of what was evicted
    cache.restore([Restore(10, 0, TOKENS)])
    cache.save([Save(2, 0)])  # takes the region that was just read
    cache.evict([2])
    cache.restore([Restore(11, NUM_BYTES, TOKENS), Restore(12, 0, TOKENS)])
    assert not stream.query(), "the host has waited for the device"
    sums = [cache.tensors[10 + i].float().sum() for i in range(3)]  # the current stream waits, the host does not
    torch.cuda.synchronize()
    for i in range(3):
        assert torch.equal(cache.tensors[10 + i], images[i]) and sums[i] == images[i].float().sum()
    assert all(torch.equal(tensor, images[3]) for tensor in reused)


def test_the_memory_is_pinned_and_not_rounded() -> None:
    """Red if a copy goes through memory that may be paged out, or if 3 MiB take 4."""
    host = allocate_host(3 << 20, torch.device("cuda", torch.cuda.current_device()))
    assert host.is_pinned() and host[100:].is_pinned() and host.nbytes == 3 << 20
