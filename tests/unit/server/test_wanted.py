"""Pixels that have to wait for room, with a loader that has none. Red if a question goes without an answer, or gets two."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import pytest

from engine.arena import ArenaFull
from engine.messages import PROCESSOR_ARENA, ImageSource, Pixels, Region, WantedPixels
from server import wanted
from server.wanted import PixelMaker

SOURCE = ImageSource("rgb", Region(PROCESSOR_ARENA, 0, 12), 2, 2)
QUESTION = WantedPixels(7, 3)


class Loader:
    """Decodes if there is room."""

    has_room = False
    num_tries = 0

    async def decode(self, index: int, image: object, holdings: object) -> ImageSource:
        self.num_tries += 1
        if not self.has_room:
            raise ArenaFull("no room")
        return SOURCE


def answers(during: Callable[[PixelMaker, Loader, "asyncio.Task[ImageSource]"], None], is_alone: bool = False) -> tuple[list[Pixels], int]:
    """What the scheduler is told if this happens while the question waits, and how often it was tried."""

    async def ask() -> tuple[list[Pixels], int]:
        loader, sent = Loader(), cast(Any, asyncio.Queue())
        sent.send = sent.put_nowait
        maker = PixelMaker(cast(Any, loader), sent, lambda: not is_alone)
        task = maker.make(QUESTION, cast(Any, None), cast(Any, None))
        await asyncio.sleep(0.01)
        during(maker, loader, task)
        await asyncio.wait((task,), timeout=5)
        await asyncio.sleep(0)
        return [sent.get_nowait() for _ in range(sent.qsize())], loader.num_tries

    return asyncio.run(ask())


def test_room_that_came_is_tried() -> None:
    def give(maker: PixelMaker, loader: Loader, task: object) -> None:
        loader.has_room = True
        maker.note_room()

    assert answers(give) == ([Pixels(7, 3, SOURCE, None)], 2)


def test_the_wait_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if room comes again and again, but never enough."""
    monkeypatch.setattr(wanted, "ROOM_TIMEOUT_S", 0.1)
    (answer,), num_tries = answers(lambda maker, loader, task: maker.note_room())
    assert num_tries == 2 and answer.source is None and answer.error is not None and answer.error.status == 503


def test_nobody_waits_who_is_alone() -> None:
    (answer,), num_tries = answers(lambda maker, loader, task: None, is_alone=True)
    assert num_tries == 1 and answer.error is not None and answer.error.status == 503


def test_a_released_request_is_not_answered() -> None:
    assert answers(lambda maker, loader, task: cast(None, task.cancel())) == ([], 1)
