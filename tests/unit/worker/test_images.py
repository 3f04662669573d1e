"""The worker's image cache and reader, without a model."""

import io
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from engine.wire.arena import ArenaView, create_memfd
from engine.wire.messages import Encode, ImageSource, Prefetch, Region
from engine.worker.images import MAX_GROUP_TOKENS, ImageCache
from engine.worker.jpeg import ImageReader
from models.kernels.reference.jpeg import PillowDecoder
from models.media.geometry import Grid
from models.parallel.group import TensorParallel

SINGLE = TensorParallel.single()
CPU = torch.device("cpu")


class Tower:
    def __init__(self) -> None:
        self.device = CPU
        self.dtype = torch.bfloat16
        geometry = SimpleNamespace(num_tokens=lambda grid: grid[2])
        self.config = SimpleNamespace(geometry=geometry, num_visual_levels=4, text=SimpleNamespace(hidden_size=24))
        self.groups = []

    def encode(self, images: list[int], grids: list[Grid]) -> list[torch.Tensor]:
        assert [w for _, _, w in grids] == images
        self.groups.append(images)
        return [torch.full((1, image, 1), float(image)) for image in images]


class Waits:
    def __init__(self) -> None:
        self.events = []

    def wait_event(self, event: object) -> None:
        self.events.append(event)


def cache_of(tower: Any, stream: Any = None) -> ImageCache:
    reader = SimpleNamespace(read=lambda sources: [source.width for source in sources], read_copy=lambda source: (source.width, b""))
    return ImageCache(tower, reader, SINGLE, stream)


def encode(image_id: int, num_tokens: int, ticket: int = 0) -> Encode:
    return Encode(image_id, ImageSource("rgb", Region(1, 0, 0), 1, num_tokens, ticket=ticket), (1, 1, num_tokens))


def announce(cache: ImageCache, ticket: int, num_tokens: int) -> None:
    cache.prefetch(Prefetch(encode(0, num_tokens, ticket).source, (1, 1, num_tokens)))


@pytest.mark.parametrize(
    ("num_tokens", "count", "groups"),
    [(880, 14, [1, 2, 3, 5, 3]), (2040, 5, [1, 1, 2, 1]), (3600, 4, [1, 1, 1, 1]), (16_384, 2, [1, 1]), (100, 9, [6, 3])],
)
def test_groups_grow_and_are_bounded(num_tokens: int, count: int, groups: list[int]) -> None:
    tower = Tower()
    cache = cache_of(tower)
    cache.encode([encode(i, num_tokens) for i in range(count)])
    assert [len(group) for group in tower.groups] == groups
    assert all(len(group) == 1 or sum(group) <= MAX_GROUP_TOKENS for group in tower.groups)
    assert cache.tensors.keys() == set(range(count))


def test_evicted_memory_is_used_again_after_its_last_reader() -> None:
    stream = Waits()
    cache = cache_of(Tower(), stream)
    cache.tensors = {i: torch.empty(0) for i in range(3)}
    first, second = object(), object()
    cache.note_use([0, 1], first)
    cache.note_use(iter([1]), second)
    cache.evict([2])
    assert stream.events == []
    cache.evict([1])
    assert stream.events == [second]
    cache.evict([0])
    assert stream.events == [second, first] and not cache.tensors


def test_an_announced_image_is_encoded_once_and_at_once() -> None:
    tower = Tower()
    cache = cache_of(tower)
    announce(cache, 7, 600)
    assert tower.groups == [[600]]
    encoded = cache.encode([encode(0, 500), encode(1, 600, ticket=7), encode(2, 400)])
    assert tower.groups == [[600], [500, 400]] and len(encoded.pixels) == 3
    assert [cache.tensors[image_id].shape[1] for image_id in (0, 1, 2)] == [500, 600, 400]
    cache.encode([encode(3, 600, ticket=7)])
    assert tower.groups[2:] == [[600]], "an embedding has one owner"


def test_an_announcement_holds_until_the_next_one() -> None:
    tower = Tower()
    cache = cache_of(tower)
    announce(cache, 1, 600)
    cache.encode([encode(0, 300)])
    cache.encode([encode(1, 600, ticket=1)])
    announce(cache, 2, 500)
    announce(cache, 3, 400)
    cache.encode([encode(2, 500, ticket=2), encode(3, 400, ticket=3)])
    assert tower.groups == [[600], [300], [500], [400], [500]]


class Announced:
    def __init__(self) -> None:
        self.arena = ArenaView(create_memfd("arena", 1 << 20), 1 << 20, writable=True)
        self.num_decoded = 0
        self._pillow = PillowDecoder(1, CPU)
        self.reader = ImageReader(self.arena, self, CPU)

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        self.num_decoded += len(payloads)
        return self._pillow.decode(payloads)

    def put(self, offset: int, data: bytes) -> Region:
        self.arena.view(offset, len(data))[:] = data
        return Region(1, offset, len(data))


def jpeg(seed: int, height: int = 40, width: int = 56, **options: object) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return buffer.getvalue()


def test_a_copy_is_what_is_decoded() -> None:
    there = Announced()
    source = ImageSource("jpeg", there.put(0, jpeg(1)), 40, 56, ticket=7)
    (expected,) = there.reader.read([source])
    read = there.reader.read_copy(source)
    there.put(0, jpeg(9))
    assert read is not None and expected is not None and torch.equal(read[0], expected) and read[1].startswith(jpeg(1))


@pytest.mark.parametrize("data", [jpeg(1, 64, 64), jpeg(1, progressive=True), b"\xff\xd8 anything \xff\xd9", b"\0" * 500])
def test_bytes_that_nobody_has_checked_are_not_decoded(data: bytes) -> None:
    there = Announced()
    region = there.put(0, data)
    assert there.reader.read_copy(ImageSource("jpeg", region, 40, 56)) is None and there.num_decoded == 0
