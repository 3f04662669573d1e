"""The worker's image cache: how an encode is cut into groups, and when evicted memory may be used again. Without a model."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.messages import Encode, ImageSource, Region
from engine.worker.images import MAX_GROUP_TOKENS, ImageCache
from models.layers.parallel import TensorParallel

SINGLE = TensorParallel.single()


class Tower:
    """What the cache needs of a model. An image is a number: its tokens."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(geometry=SimpleNamespace(num_tokens=lambda grid: grid[2]))
        self.groups: list[list[int]] = []

    def encode(self, images: list[int]) -> list[torch.Tensor]:
        self.groups.append(images)
        return [torch.full((1, image, 1), float(image)) for image in images]


class Waits:
    """Stands in for the tower's stream."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def wait_event(self, event: object) -> None:
        self.events.append(event)


def cache_of(tower: Any, stream: Any = None) -> ImageCache:
    reader: Any = SimpleNamespace(read=lambda sources: [source.width for source in sources])
    return ImageCache(tower, reader, SINGLE, stream)


def encode(image_id: int, num_tokens: int) -> Encode:
    return Encode(image_id, ImageSource("rgb", Region(1, 0, 0), 1, num_tokens), (1, 1, num_tokens))


@pytest.mark.parametrize(
    ("num_tokens", "count", "groups"),
    [(880, 14, [1, 2, 3, 5, 3]), (2040, 5, [1, 1, 2, 1]), (3600, 4, [1, 1, 1, 1]), (16_384, 2, [1, 1]), (100, 9, [6, 3])],
)
def test_groups_grow_and_are_bounded(num_tokens: int, count: int, groups: list[int]) -> None:
    """Red if the tower waits for more than a first image, encodes fewer at once than it could, or holds more than a group may have."""
    tower = Tower()
    cache = cache_of(tower)
    cache.encode([encode(i, num_tokens) for i in range(count)])
    assert [len(group) for group in tower.groups] == groups
    assert all(len(group) == 1 or sum(group) <= MAX_GROUP_TOKENS for group in tower.groups)
    assert cache.tensors.keys() == set(range(count))


def test_evicted_memory_is_used_again_after_its_last_reader() -> None:
    """Red if the tower may overwrite an embedding that a step still reads, or waits for steps that do not read what goes."""
    stream = Waits()
    cache = cache_of(Tower(), stream)
    cache.tensors = {i: torch.empty(0) for i in range(3)}
    first, second = object(), object()
    cache.note_use([0, 1], first)  # type: ignore[arg-type]
    cache.note_use(iter([1]), second)  # type: ignore[arg-type]
    cache.evict([2])
    assert stream.events == []
    cache.evict([1])
    assert stream.events == [second]
    cache.evict([0])
    assert stream.events == [second, first] and not cache.tensors
