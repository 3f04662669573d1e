"""The worker's image cache: how an encode is cut into groups, when evicted memory may be used again.

Without a model.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.messages import Encode, ImageSource, Prefetch, Region
from engine.worker.images import MAX_GROUP_TOKENS, ImageCache
from models.media.geometry import Grid
from models.parallel.group import TensorParallel

SINGLE = TensorParallel.single()
CPU = torch.device("cpu")


class Tower:
    """What the cache needs of a model. An image is a number: its tokens."""

    def __init__(self) -> None:
        self.device = CPU
        self.dtype = torch.bfloat16
        geometry = SimpleNamespace(num_tokens=lambda grid: grid[2])
        self.config = SimpleNamespace(geometry=geometry, num_visual_levels=4, text=SimpleNamespace(hidden_size=24))
        self.groups: list[list[int]] = []

    def encode(self, images: list[int], grids: list[Grid]) -> list[torch.Tensor]:
        assert [w for _, _, w in grids] == images
        self.groups.append(images)
        return [torch.full((1, image, 1), float(image)) for image in images]


class Waits:
    def __init__(self) -> None:
        self.events: list[object] = []

    def wait_event(self, event: object) -> None:
        self.events.append(event)


def cache_of(tower: Any, stream: Any = None) -> ImageCache:
    reader: Any = SimpleNamespace(
        read=lambda sources: [source.width for source in sources], read_copy=lambda source: (source.width, b"")
    )
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
    """Red if the tower waits for more than a first image, or holds more than a group may have."""
    tower = Tower()
    cache = cache_of(tower)
    cache.encode([encode(i, num_tokens) for i in range(count)])
    assert [len(group) for group in tower.groups] == groups
    assert all(len(group) == 1 or sum(group) <= MAX_GROUP_TOKENS for group in tower.groups)
    assert cache.tensors.keys() == set(range(count))


def test_evicted_memory_is_used_again_after_its_last_reader() -> None:
    """Red if the tower waits for steps that do not read it."""
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


class OneOfTwo:
    """The first of two ranks; the other one's rows arrive as sevens."""

    rank, size = 0, 2

    def __init__(self) -> None:
        self.gathered: list[torch.Tensor] = []

    def all_gather_rows(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        assert len(rows) == counts[0]
        self.gathered.append(rows)
        return torch.cat([rows, torch.full((counts[1], *rows.shape[1:]), 7.0, dtype=rows.dtype)])


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError, MemoryError])
def test_a_rank_without_memory_comes_to_the_gather_all_the_same(problem: type[Exception]) -> None:
    """Otherwise the other ranks wait for ever. It names the images that it lacks."""
    tower, pair = Tower(), OneOfTwo()
    cache = cache_of(tower)
    cache.tp = pair  # type: ignore[assignment]
    healthy = tower.encode

    def fail(images: list[int], grids: list[Grid]) -> list[torch.Tensor]:
        raise problem

    tower.encode = fail  # type: ignore[method-assign]
    encoded = cache.encode([encode(1, 10), encode(2, 8), encode(3, 6), encode(4, 4)])
    own = {image_id for image_id in (1, 2, 3, 4) if not cache.tensors[image_id].any()}
    assert encoded.starved and set(encoded.starved) == own and encoded.failed == []
    assert all((cache.tensors[image_id] == 7).all() for image_id in {1, 2, 3, 4} - own) and len(own) < 4
    assert [cache.tensors[image_id].shape[1] for image_id in (1, 2, 3, 4)] == [10, 8, 6, 4]
    tower.encode = lambda images, grids: [image.expand(4, -1, 24) for image in healthy(images, grids)]  # type: ignore[method-assign]
    assert cache.encode([encode(5, 10)]).starved == ()
    assert len(pair.gathered) == 2


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


def test_what_was_announced_to_another_size_is_encoded_anew() -> None:
    tower = Tower()
    cache = cache_of(tower)
    source = encode(0, 600, ticket=1).source
    cache.prefetch(Prefetch(source, (1, 1, 600)))
    tower.encode = lambda images, grids: [torch.zeros(1, w, 1) for _, _, w in grids]  # type: ignore[method-assign]
    cache.encode([Encode(1, source, (1, 1, 150))])
    assert cache.tensors[1].shape[1] == 150


@pytest.mark.parametrize("problem", [torch.OutOfMemoryError, MemoryError])
def test_an_announced_image_that_cannot_be_encoded_yet_awaits_its_plan(problem: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a hint ends the worker or makes the plan fail."""
    tower = Tower()
    cache = cache_of(tower)

    def fail(images: list[int], grids: list[Grid]) -> list[torch.Tensor]:
        raise problem

    with monkeypatch.context() as patch:
        patch.setattr(tower, "encode", fail)
        announce(cache, 1, 600)
    assert tower.groups == []
    cache.encode([encode(1, 600, ticket=1)])
    assert tower.groups == [[600]]
