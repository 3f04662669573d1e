"""Which images rank 0 is told of before there is a plan. Red if a busy engine's worker is kept from its plans, or known images are read."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from engine.messages import ImageSource, Prefetch, Region
from models.geometry import VisionGeometry
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


def test_the_first_new_image_of_an_idle_engine(early: EarlyReads, sent: list[Prefetch]) -> None:
    assert early.announce(b"a", SOURCE) == 0  # nobody said that the engine is idle
    early.arm(1, is_idle=True)
    assert early.announce(b"a", SOURCE) == 0  # seen before, so it is encoded as a rule
    early.arm(1, is_idle=False)  # what else comes of the same request
    ticket = early.announce(b"b", SOURCE)
    assert ticket and sent == [Prefetch(SOURCE, ticket, GRID)]
    early.arm(1, is_idle=False)
    assert early.announce(b"c", SOURCE) == 0  # one is enough: the others are read while the device works on it
    early.arm(2, is_idle=True)
    assert early.announce(b"d", SOURCE) == ticket + 1


def test_a_busy_engine_is_left_alone(early: EarlyReads, sent: list[Prefetch]) -> None:
    early.arm(1, is_idle=True)  # a text
    early.arm(2, is_idle=False)
    assert early.announce(b"a", SOURCE) == 0 and not sent


def test_what_is_urgent_is_so_once() -> None:
    """Red if an idle engine's event loop takes up more than one image of a request, or any where no GPU waits."""
    worker: Any = SimpleNamespace(send=lambda message: None)
    early, without = EarlyReads(worker, GEOMETRY), EarlyReads(None, GEOMETRY)
    assert not early.is_urgent()
    for rid in (1, 2):
        early.arm(rid, is_idle=True)
        without.arm(rid, is_idle=True)
        assert [early.is_urgent(), early.is_urgent(), without.is_urgent()] == [True, False, False]
        early.arm(rid, is_idle=True)  # what else comes of the same request
        assert not early.is_urgent()
    early.arm(3, is_idle=False)
    assert not early.is_urgent()


def test_large_images_wait_for_their_plan(early: EarlyReads, sent: list[Prefetch]) -> None:
    early.arm(1, is_idle=True)
    assert early.announce(b"a", ImageSource("jpeg", Region(1, 0, 1000), 8000, 8000)) == 0
    assert early.announce(b"b", ImageSource("jpeg", Region(1, 0, MAX_BYTES + 1), 720, 1280)) == 0
    assert not sent and early.announce(b"c", SOURCE)


def test_what_is_remembered_is_bounded(early: EarlyReads) -> None:
    for i in range(NUM_REMEMBERED + 1):
        early.announce(i.to_bytes(4, "little"), SOURCE)
    early.arm(1, is_idle=True)
    assert early.announce((0).to_bytes(4, "little"), SOURCE)


def test_without_a_gpu_nobody_is_told() -> None:
    early = EarlyReads(None, GEOMETRY)
    early.arm(1, is_idle=True)
    assert early.announce(b"a", SOURCE) == 0


def test_the_size_is_what_the_last_request_wanted(early: EarlyReads, sent: list[Prefetch]) -> None:
    """Red if a client that always has its images made smaller always has one encoded in vain, or if a shape without grid raises."""
    early.geometry = dataclasses.replace(GEOMETRY, max_pixels=1 << 18)
    early.arm(1, is_idle=True)
    early.announce(b"a", SOURCE)
    early.arm(2, is_idle=True)
    early.announce(b"b", ImageSource("jpeg", Region(1, 0, 1000), 2, 4000))
    assert [prefetch.grid for prefetch in sent] == [early.geometry.grid(720, 1280), None] and sent[0].grid != GRID
