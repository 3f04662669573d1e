"""What intake and output need of a medium of any kind."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from engine.wire.messages import ImageSource, ImageSpan
from models.config.types import MediaKind
from server.processor.media.inspect import Allowance
from server.processor.text.prompt import Visual


class Medium(Protocol):
    """One medium of one request."""

    kind: MediaKind

    index: int  # in its request

    @property
    def num_bytes(self) -> int: ...  # at most, of its payloads

    def start(self) -> bool:
        """Take memory for the payloads if there is enough now. Return whether all have it."""

    async def begin(self) -> None:
        """Take memory for the payloads, waiting for it; call it for one request at a time. RequestError or ArenaTooSmall."""

    async def load(self, allowance: Allowance) -> None:
        """Load a medium of a request with this allowance. RequestError, ArenaFull or ArenaTooSmall."""

    @property
    def counts(self) -> Mapping[str, int]: ...  # for `Stages.counts`

    @property
    def visual(self) -> Visual: ...

    def spans(self, starts: list[int]) -> list[ImageSpan]:
        """Return a span of placeholders per item; they begin at `starts`."""

    @property
    def item_bytes(self) -> int:
        """Return the size of an item's pixels, if it is a file."""

    async def decode(self, items: Sequence[int], offset: int) -> list[ImageSource]:
        """Write the RGB of these items consecutively to the arena. RequestError."""

    async def release(self) -> None:
        """Free all memory as soon as no thread uses it. The medium may begin again afterwards."""


async def release_all(media: Iterable[Medium]) -> None:
    await asyncio.gather(*(medium.release() for medium in media))
