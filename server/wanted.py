"""Pixels that the scheduler wants of files which came with a request: made when there is room for them. Used by `server/processor.py`."""

import asyncio
from collections.abc import Callable

from engine.arena import ArenaFull
from engine.ipc import Outbox
from engine.messages import ImageSource, Pixels, ToScheduler, WantedPixels
from server.errors import error_of
from server.media import LoadedImage, MediaLoader
from server.region import Holdings

ROOM_TIMEOUT_S = 10.0  # requests that wait for each other's room must not do so for ever


class PixelMaker:
    """Answers every question with pixels or an error, but for those whose request is released first: it cancels their tasks.

    A request that asks may have streamed text already, so a lack of room is waited out while others may give some back.
    `may_room_come` says whether there are any.
    """

    def __init__(self, loader: MediaLoader, scheduler: Outbox[ToScheduler], may_room_come: Callable[[], bool]):
        self._loader = loader
        self._scheduler = scheduler
        self._may_room_come = may_room_come
        self._room_came = asyncio.Event()

    def make(self, wanted: WantedPixels, image: LoadedImage, holdings: Holdings) -> asyncio.Task[ImageSource]:
        """Starts to decode the file; its region and its pixels' are among the holdings."""
        task = asyncio.create_task(self._decode(wanted.index, image, holdings))
        task.add_done_callback(lambda task: self._answer(wanted, task))
        return task

    def note_room(self) -> None:
        """Something was given back: whoever waits tries again."""
        self._room_came.set()
        self._room_came = asyncio.Event()

    async def _decode(self, index: int, image: LoadedImage, holdings: Holdings) -> ImageSource:
        deadline = asyncio.get_running_loop().time() + ROOM_TIMEOUT_S
        while True:
            room_came = self._room_came
            try:
                return await self._loader.decode(index, image, holdings)
            except ArenaFull as lack:
                if not self._may_room_come():
                    raise
                try:
                    async with asyncio.timeout_at(deadline):
                        await room_came.wait()
                except TimeoutError:
                    raise lack from None

    def _answer(self, wanted: WantedPixels, task: asyncio.Task[ImageSource]) -> None:
        if task.cancelled():
            return
        failure = task.exception()
        source, error = (task.result(), None) if failure is None else (None, error_of(failure))
        self._scheduler.send(Pixels(wanted.rid, wanted.index, source, error))
