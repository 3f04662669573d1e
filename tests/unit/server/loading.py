"""Images that are loaded between two real arenas, for tests."""

import base64
import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.wire.arena import ArenaTooSmall, ArenaView, GrowingRegion, create_memfd
from engine.wire.config import EngineConfig
from engine.wire.messages import API_ARENA, MediaRef, Prefetch, Region, VideoRef
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.decoders import Decoders
from server.processor.media.image import Image, Images
from server.processor.media.sources import RegionAllocator, Sources, release_all
from server.processor.media.video import FrameList, Medium, VideoFile, Videos
from tests.unit.engine.arenas import check_arena

SIZE = 16 << 20


class Loading:
    def __init__(self, checkpoint: Checkpoint, **settings: object):
        self.bodies_fd, self.arena_fd = create_memfd("bodies", SIZE), create_memfd("arena", SIZE)
        self.bodies = ArenaView(self.bodies_fd, SIZE, writable=True)
        allocator = self.allocator = RegionAllocator(self.arena_fd, SIZE)
        self.arena = allocator.pixels
        self.announced: list[Prefetch] = []
        worker: Any = SimpleNamespace(send=self.announced.append)
        config = EngineConfig(**settings)
        self.sources = Sources(config, ArenaView(self.bodies_fd, SIZE), allocator)
        self.decoders = Decoders(config, self.arena)
        self.images = Images(config, checkpoint.model.geometry, self.sources, self.decoders, worker)
        self.videos = Videos(config, checkpoint, self.images)
        self._images: list[Medium] = []
        self._pixels: list[GrowingRegion] = []
        self._decoded: dict[Medium, np.ndarray] = {}

    async def close(self) -> None:
        await self.sources.close()
        await self.decoders.pool.close()
        await self.release()
        check_arena(self.allocator.inputs)
        check_arena(self.allocator.pixels)
        assert self.allocator.is_empty()
        os.close(self.bodies_fd)
        os.close(self.arena_fd)

    async def release(self) -> None:
        images, self._images = self._images, []
        await release_all(images)
        while self._pixels:
            self.allocator.free(self._pixels.pop())

    def body(self, text: bytes) -> MediaRef:
        self.bodies.view(0, len(text))[:] = text
        return MediaRef(Region(API_ARENA, 0, len(text)))

    def new_image(self, ref: MediaRef) -> Image:
        return Image(self.images, ref)

    async def load(self, ref: MediaRef) -> Image:
        image = self.new_image(ref)
        self._images.append(image)
        if not image.start():
            raise ArenaTooSmall
        await image.load()
        if image.source.encoding == "file":
            await self.decode(image, 0)
        return image

    async def decode(self, medium: Medium, *items: int) -> np.ndarray:
        """Decode items that are files; return their pixels (items, frames, h, w, 3)."""
        region = await self.allocator.reserve(len(items) * medium.item_bytes)
        self._pixels.append(region)
        sources = await medium.decode(items, region.offset)
        views = [self.arena.view(source.region.offset, source.region.length) for source in sources]
        shape = sources[0].num_frames, sources[0].height, sources[0].width, 3
        self._decoded[medium] = np.stack([np.frombuffer(bytes(view), np.uint8).reshape(shape) for view in views])
        return self._decoded[medium]

    async def load_bytes(self, data: bytes) -> Image:
        return await self.load(self.body(base64.b64encode(data)))

    async def load_video(self, text: bytes, **fields: Any) -> VideoFile | FrameList:
        file = self.body(text)
        video = self.videos.make(VideoRef(file=file, **fields), self.new_image)
        self._images.append(video)
        video.start()
        await video.load()
        await self.decode(video, *range(len(video.hashes)))
        return video

    def pairs_of(self, video: Medium) -> np.ndarray:
        return self._decoded[video]

    def bytes_of(self, image: Image) -> bytes:
        if image in self._decoded:
            return self._decoded[image].tobytes()
        return bytes(self.arena.view(image.source.region.offset, image.source.region.length))

    async def refusal(self, ref: MediaRef) -> RequestError:
        with pytest.raises(RequestError) as caught:
            await self.load(ref)
        assert "/" not in caught.value.info.message.replace("file://", "").replace("http(s)", "")
        assert caught.value.info.message.startswith("Image 1: ")
        return caught.value
