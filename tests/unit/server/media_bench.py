"""A loader of images between two real arenas, for tests."""

import base64
import os

import pytest

from engine.arena import Arena, ArenaView, create_memfd
from engine.config import EngineConfig
from engine.messages import API_ARENA, MediaRef, Region
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.media import LoadedImage, MediaLoader
from server.region import Holdings

SIZE = 8 << 20


class Bench:
    """A loader between two real arenas, as the processor has it."""

    def __init__(self, checkpoint: Checkpoint, **settings: object):
        self.bodies_fd, self.arena_fd = create_memfd("bodies", SIZE), create_memfd("arena", SIZE)
        self.bodies = ArenaView(self.bodies_fd, SIZE, writable=True)
        self.arena = Arena(self.arena_fd, SIZE)
        self.loader = MediaLoader(EngineConfig(**settings), checkpoint, ArenaView(self.bodies_fd, SIZE))  # type: ignore[arg-type]
        self.holdings = Holdings(self.arena)

    async def close(self) -> None:
        await self.loader.close()
        self.holdings.drop_all()
        self.arena.check()
        assert self.arena.is_empty()
        os.close(self.bodies_fd)
        os.close(self.arena_fd)

    def body(self, text: bytes) -> MediaRef:
        """Base64 text as the scanner leaves it in the api's arena."""
        self.bodies.view(0, len(text))[:] = text
        return MediaRef(Region(API_ARENA, 0, len(text)))

    async def load(self, ref: MediaRef) -> LoadedImage:
        payload = ref.payload
        begun = {} if payload is None else {payload.offset: self.loader.begin(payload, self.holdings, lambda _: None)}
        return await self.loader.load(0, ref, self.holdings, begun)

    async def load_bytes(self, data: bytes) -> LoadedImage:
        return await self.load(self.body(base64.b64encode(data)))

    def bytes_of(self, image: LoadedImage) -> bytes:
        return bytes(self.arena.view(image.source.region.offset, image.source.region.length))

    async def refusal(self, ref: MediaRef) -> RequestError:
        """The error of an image that is not accepted: its words must not tell where anything is."""
        with pytest.raises(RequestError) as caught:
            await self.load(ref)
        assert "/" not in caught.value.info.message.replace("file://", "").replace("http(s)", "")
        assert caught.value.info.message.startswith("Image 1: ")
        return caught.value
