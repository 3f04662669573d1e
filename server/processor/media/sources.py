"""Encoded bytes of media, from request bodies, URLs and earlier requests."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.wire.arena import ArenaView
from engine.wire.config import EngineConfig
from engine.wire.messages import MediaRef, Region
from server.errors import RequestError
from server.processor.media.allocator import RegionAllocator
from server.processor.media.base64_text import decode_base64, decode_data_url
from server.processor.media.fetch import Fetcher
from server.processor.media.named import NamedImages
from server.processor.threads import run
from server.region import GrowingRegion

FIRST_DOWNLOAD_BYTES = 1 << 20


class Sources:
    """Writes encoded bytes to regions of `allocator`, in threads of `pool`. Create it inside a running event loop."""

    def __init__(self, config: EngineConfig, bodies: ArenaView, allocator: RegionAllocator):
        self.bodies, self.allocator = bodies, allocator
        self.pool = ThreadPoolExecutor(config.media_pool_size, "media")
        self.fetcher = Fetcher(config)
        self._named = NamedImages()

    async def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        await self.fetcher.close()

    def unpacking(self, payload: Region, encoded: GrowingRegion) -> Callable[[], None]:
        """Return a job for any thread that decodes base64 of a body to `encoded`, which has the capacity for it. The job raises
        RequestError 422."""
        text, target = self.bodies.view(payload.offset, payload.length), np.frombuffer(encoded.unused, np.uint8)

        def unpack() -> None:
            data = decode_base64(text)
            encoded.used = len(data)
            np.copyto(target[: len(data)], np.frombuffer(data, np.uint8))  # without the interpreter lock, unlike a slice assignment

        return unpack

    async def fetch(self, ref: MediaRef, hold: Callable[[GrowingRegion], GrowingRegion], max_bytes: int | None = None) -> GrowingRegion:
        """Return the bytes of a URL, or those that were sent under a name earlier. `hold` takes ownership of the region before it is
        filled. RequestError, ArenaFull or ArenaTooSmall."""
        url = ref.url or ""
        scheme = url.partition(":")[0].lower()
        if scheme in ("http", "https"):
            encoded = hold(self.allocator.allocate(FIRST_DOWNLOAD_BYTES))
            await self.fetcher.download(url, encoded.append, max_bytes)
            return encoded
        if ref.url is None:
            data = self._named.get(ref.name or b"")
            if data is None:
                raise RequestError(400, "no media with this uuid is cached: send it with its URL", code="unknown_uuid")
        else:
            data = await run(self.pool, lambda: decode_data_url(url) if scheme == "data" else self.fetcher.read_local(url, max_bytes))
        encoded = hold(self.allocator.allocate(len(data)))
        encoded.append(data)
        return encoded

    async def keep(self, name: bytes | None, digest: bytes, encoded: GrowingRegion) -> None:
        """Remember the bytes under the name, if the client gave one. RequestError 400 if the name is bound to other content."""
        if name is not None and self._named.bind(name, digest):
            self._named.put(name, await run(self.pool, lambda: bytes(encoded.view)))
