"""Which images rank 0 is told of before there is a plan. Red if a busy engine's worker is kept from its plans, or known images are read."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.messages import ImageSource, Prefetch, Region
from models.media.geometry import VisionGeometry
from server.processor.early import MAX_BYTES, NUM_REMEMBERED, EarlyReads

SOURCE = ImageSource("jpeg", Region(1, 0, 1000), 720, 1280)
GEOMETRY = VisionGeometry(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=1 << 16, max_pixels=1 << 24)
GRID = GEOMETRY.grid(720, 1280)


@pytest.fixture
def sent() -> list[Prefetch]:
    return []


@pytest.fixture
def early(sent: list[Prefetch]) -> EarlyReads:
    worker: Any = SimpleNamespace(send=sent.append)
    return EarlyReads(worker, GEOMETRY)


def announce(early: EarlyReads, name: str, source: ImageSource = SOURCE) -> int:
    return early.announce(memoryview(name.encode()), source)


def test_the_first_new_image_of_an_idle_engine(early: EarlyReads, sent: list[Prefetch]) -> None:
    assert announce(early, "a") == 0  # nobody said that the engine is idle
    early.arm(is_idle=True)
    assert announce(early, "a") == 0  # seen before, so it is encoded as a rule
    ticket = announce(early, "b")
    assert ticket and sent == [Prefetch(msgspec.structs.replace(SOURCE, ticket=ticket), GRID)]
    assert announce(early, "c") == 0  # one is enough: the others are read while the device works on it
    early.arm(is_idle=True)
    assert announce(early, "d") == ticket + 1


def test_a_busy_engine_is_left_alone(early: EarlyReads, sent: list[Prefetch]) -> None:
    early.arm(is_idle=True)  # a text
    early.arm(is_idle=False)
    assert announce(early, "a") == 0 and not early.is_urgent and not sent


def test_large_images_wait_for_their_plan(early: EarlyReads, sent: list[Prefetch]) -> None:
    """Red if what a worker's memory was not planned for is read, or if a shape without a grid raises."""
    early.arm(is_idle=True)
    for height, width in ((8000, 8000), (1440, 2560), (2, 4000)):
        assert announce(early, f"{height}", ImageSource("jpeg", Region(1, 0, 1000), height, width)) == 0
    assert early.announce(memoryview(bytes(MAX_BYTES + 1)), SOURCE) == 0
    assert not sent and announce(early, "c")


def test_what_is_remembered_is_bounded(early: EarlyReads) -> None:
    for i in range(NUM_REMEMBERED + 1):
        announce(early, f"{i}")
    early.arm(is_idle=True)
    assert announce(early, "0")


def test_without_a_gpu_nobody_is_told() -> None:
    early = EarlyReads(None, GEOMETRY)
    early.arm(is_idle=True)
    assert announce(early, "a") == 0 and not early.is_urgent


def test_the_size_is_what_the_last_request_wanted(early: EarlyReads, sent: list[Prefetch]) -> None:
    """Red if a client that always has its images made smaller always has one encoded in vain."""
    early.geometry = dataclasses.replace(GEOMETRY, max_pixels=1 << 18)
    early.arm(is_idle=True)
    announce(early, "a")
    assert [prefetch.grid for prefetch in sent] == [early.geometry.grid(720, 1280)] != [GRID]
