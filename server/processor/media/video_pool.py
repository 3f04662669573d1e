"""The pool of guest processes that decode video files."""

from importlib.util import find_spec
from typing import TypeVar

import msgspec
from cachetools import LRUCache

from engine.wire.arena import Arena
from engine.wire.config import EngineConfig
from server.errors import RequestError
from server.processor.media.decoders import Size, answer_of, pool_of
from server.processor.media.video_jobs import Clip, VideoJob, VideoLimits, invalid_video
from server.processor.media.video_plan import VideoPlan
from server.region import Region

NUM_REMEMBERED = 512  # decoded files

T = TypeVar("T")


class VideoDecoders:
    """Decoders of video files. Create it inside a running event loop."""

    def __init__(self, config: EngineConfig, arena: Arena):
        self.num_decoded = 0
        self.max_bytes = config.max_video_bytes
        self.known: LRUCache[bytes, tuple[VideoPlan, list[bytes]]] = LRUCache(NUM_REMEMBERED)  # by file and processing
        size = config.video_pool_size
        threads = max(1, config.processing_pool_size // size)
        limits = VideoLimits(config.max_video_frame_pixels, config.max_video_file_frames, config.max_video_memory, threads)
        self._timeout, encoded = config.video_timeout, msgspec.json.encode(limits).decode()
        self._pool = pool_of(size, arena, "server.processor.media.video_decoder", encoded, memory=limits.memory)
        self._is_installed = find_spec("av") is not None

    async def close(self) -> None:
        await self._pool.close()

    async def look(self, encoded: Region) -> Clip:
        """Inspect a file. RequestError 400, 413 or 422."""
        return await self._ask(VideoJob((encoded.offset, encoded.used)), Clip)

    async def read(self, encoded: Region, wanted: list[int], pixels: Region, size: Size, parameters: bytes) -> list[bytes]:
        """Write these frames to `pixels` and return the hashes of their pairs. RequestError as in `look`."""
        place = {"encoded": (encoded.offset, encoded.used), "target": (pixels.offset, pixels.capacity)}
        return await self._ask(VideoJob(**place, wanted=wanted, size=size, parameters=parameters), list[bytes])

    async def _ask(self, job: VideoJob, kind: type[T]) -> T:
        if not self._is_installed:
            words = "this server has no video decoder (PyAV is not installed): send frames"
            raise RequestError(400, words, code="no_video_decoder")
        work = self._pool.ask(msgspec.msgpack.encode(job), self._timeout)
        return await answer_of(work, kind, self._timeout, invalid_video, "the decoder crashed on this file")
