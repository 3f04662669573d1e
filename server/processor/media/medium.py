"""What intake and output need of a medium of any kind."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Protocol

from engine.wire.messages import ImageSource, ImageSpan
from models.config.types import MediaKind
from server.processor.media.inspect import Allowance
from server.processor.text.prompt import Visual


class Medium(Protocol):
    """One medium of one request. `release` must be awaited exactly once, also after errors."""

    kind: MediaKind
    num_bytes: int  # minimum arena bytes while it is loaded

    async def load(self, index: int, allowance: Allowance) -> None:
        """Load as medium `index` of a request with this allowance. RequestError, ArenaFull or ArenaTooSmall."""

    @property
    def counts(self) -> Mapping[str, int]: ...  # for `Stages.counts`

    @property
    def visual(self) -> Visual: ...

    def spans(self, starts: list[int]) -> list[ImageSpan]:
        """Return a span of placeholders per item; they begin at `starts`."""

    def make_pixels(self, item: int) -> asyncio.Task[None]:
        """Decode an item that is a file to RGB, waiting for memory. Errors as with `load`; `release` cancels it."""

    def source_of(self, item: int) -> ImageSource: ...

    async def release(self) -> None:
        """Free all memory as soon as no thread uses it."""


async def release_all(media: Iterable[Medium]) -> None:
    await asyncio.gather(*(medium.release() for medium in media))
