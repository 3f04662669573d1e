"""Videos of requests, each owned by one object from its bytes to its release. A video is a list of frame pairs, each an item like an image.

    file ──▶ encoded ─┬▶ known: its pairs are files, whose pixels are made if the scheduler asks for one          ──▶ rgb, all at once
                      └▶ new: looked at, and its frames are decoded                                               ──▶ rgb
    frames ─▶ images ─┬▶ known pair: a file                                                                       ──▶ rgb, pair by pair
                      └▶ new pair: two frames are decoded                                                         ──▶ rgb

Pixels are resized where they are decoded, and a pair's hash is of them: the same frames in another file are the same pair.
"""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.wire.config import EngineConfig
from engine.wire.messages import ImageSource, ImageSpan, MediaRef, VideoRef
from engine.wire.messages import Region as WireRegion
from models.config.types import MediaKind
from models.media.video import DEFAULT_SOURCE_FPS, VideoGeometry, time_text
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.allocator import wire
from server.processor.media.decoders import Decoders, Size
from server.processor.media.fetch import too_large
from server.processor.media.image import Image, decoded_bytes, naming, start_task
from server.processor.media.inspect import Allowance, Inspector
from server.processor.media.medium import release_all
from server.processor.media.pixels import pair_hash
from server.processor.media.sources import Sources
from server.processor.media.video_plan import PAIR, VideoPlan, VideoPlanner
from server.processor.media.video_pool import VideoDecoders
from server.processor.text.prompt import Visual
from server.processor.threads import run
from server.region import Region

CODES = {"invalid_image": "invalid_video", "image_too_large": "video_too_large"}
COMMA = ord(",")
PIECE_BYTES = 1 << 20  # bytes that a thread searches without the interpreter lock


class Video(ABC):
    """One video of one request: see `Medium`."""

    kind: MediaKind = "video"
    decodes_all = True  # all items together
    plan: VideoPlan  # set, like the next two, by `load`
    hashes: list[bytes]
    sources: list[ImageSource]

    def __init__(self, *, sources: Sources, planner: VideoPlanner, ref: VideoRef):
        self._sources, self._planner, self._allocator = sources, planner, sources.allocator
        self._ref = ref
        self._video: VideoGeometry
        self._index = 0  # in its request
        self._regions: list[Region] = []  # regions to release
        self._tasks: dict[int, asyncio.Task[None]] = {}  # decode pixels
        self.num_bytes = 0

    async def load(self, index: int, allowance: Allowance) -> None:
        self._index = index
        with naming(f"Video {self._index + 1}", CODES):
            if not self._planner.takes_videos:
                raise RequestError(400, "this model does not support videos", code="invalid_value")
            self._video = self._planner.geometry_of(self._ref)
            await self._load(allowance)

    @property
    def counts(self) -> Mapping[str, int]:
        """Return the number of frames that the model gets; the last one may be repeated."""
        return {"video_frames": len(self.plan.indices)}

    @property
    def visual(self) -> Visual:
        return Visual(self.kind, [self.plan.num_tokens] * len(self.hashes), [time_text(time) for time in self.plan.times])

    def spans(self, starts: list[int]) -> list[ImageSpan]:
        plan, items = self.plan, zip(self.hashes, starts, self.sources, strict=True)
        return [ImageSpan(digest, start, plan.num_tokens, plan.grid, source) for digest, start, source in items]

    def make_pixels(self, item: int) -> asyncio.Task[None]:
        key = 0 if self.decodes_all else item
        if key not in self._tasks:
            self._tasks[key] = start_task(self._make_named(item))
        return self._tasks[key]

    def source_of(self, item: int) -> ImageSource:
        return self.sources[item]

    async def release(self) -> None:
        tasks = [task for task in self._tasks.values() if not task.done()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._tasks = {}  # their exceptions name this video
        for region in self._regions:
            self._allocator.free(region)

    @abstractmethod
    async def _load(self, allowance: Allowance) -> None:
        """Set plan, hashes and sources."""

    @abstractmethod
    async def _make(self, item: int) -> None:
        """file -> rgb"""

    def _file(self, encoded: Region) -> ImageSource:
        return ImageSource("file", wire(encoded), *self.plan.size, num_frames=PAIR)

    def _rgb(self, pixels: Region, pair: int) -> ImageSource:
        size = self.plan.pair_bytes
        whole = wire(pixels)
        return ImageSource("rgb", WireRegion(whole.arena, whole.offset + pair * size, size), *self.plan.size, num_frames=PAIR)

    def _hold(self, region: Region) -> Region:
        self._regions.append(region)
        return region

    async def _make_named(self, item: int) -> None:
        with naming(f"Video {self._index + 1}", CODES):
            await self._make(item)


class VideoFile(Video):
    """A video file from which frames are sampled."""

    _encoded: Region
    _digest: bytes

    def __init__(self, *, decoders: VideoDecoders, **shared: Any):
        super().__init__(**shared)
        self._decoders = decoders

    async def _load(self, allowance: Allowance) -> None:
        ref = self._ref
        assert ref.file is not None
        await self._read(ref.file, allowance)
        await self._sources.keep(ref.file.name, self._digest, self._encoded)
        self._key = msgspec.msgpack.encode((self._digest, self._video, ref.source_fps))
        known = self._decoders.known.get(self._key)
        if known is not None:
            self.plan, self.hashes = known
            self.sources = [self._file(self._encoded)] * len(self.hashes)
            return
        clip = await self._decoders.look(self._encoded)
        fps = clip.fps or ref.source_fps or DEFAULT_SOURCE_FPS
        indices = self._video.sample(clip.num_frames, fps)
        times = [index / fps for index in indices]
        self.plan = self._planner.plan(self._video, indices, times, (clip.height, clip.width))
        self.num_bytes = self.plan.pair_bytes * len(self.plan.indices) // PAIR
        await self._decode(await self._allocator.allocate_when_free(self.num_bytes))

    async def _read(self, file: MediaRef, allowance: Allowance) -> None:
        if file.payload is not None:
            await self._unpack(file.payload)
        else:
            async with allowance.downloads:
                self._encoded = await self._sources.fetch(file, self._hold, self._decoders.max_bytes)
        self._encoded.trim()
        self._digest = await run(self._sources.pool, lambda: self._planner.inspector.identify(self._encoded.view, False))

    async def _unpack(self, payload: WireRegion) -> None:
        if decoded_bytes(payload) > self._decoders.max_bytes + 3:
            raise too_large(self._decoders.max_bytes)
        self._encoded = self._hold(self._allocator.allocate(decoded_bytes(payload)))
        await run(self._sources.pool, self._sources.unpacking(payload, self._encoded))

    async def _make(self, item: int) -> None:
        await self._decode(await self._allocator.allocate_when_free(self.plan.pair_bytes * len(self.hashes)))

    async def _decode(self, pixels: Region) -> None:
        """Decode all pairs and free the file."""
        plan = self.plan
        self._hold(pixels)
        self.hashes = await self._decoders.read(self._encoded, plan.indices, pixels, plan.size, self._planner.pair_parameters)
        pixels.used = pixels.capacity
        self.sources = [self._rgb(pixels, pair) for pair in range(len(self.hashes))]
        self._regions.remove(self._encoded)
        self._allocator.free(self._encoded)
        self._decoders.num_decoded += 1
        self._decoders.known[self._key] = plan, self.hashes


class FrameList(Video):
    """A list of frames sent as images; the model gets all of them."""

    decodes_all = False

    def __init__(self, *, decoders: Decoders, new_image: Callable[..., Image], frames: list[Image], **shared: Any):
        super().__init__(**shared)
        self._decoders, self._new_image, self._frames = decoders, new_image, frames
        self.num_bytes = sum(frame.num_bytes for frame in frames)

    async def release(self) -> None:
        await super().release()
        await release_all(self._frames)

    async def _load(self, allowance: Allowance) -> None:
        file = self._ref.file
        if file is None:
            self._check_number(len(self._ref.frames))
        else:
            self._frames = [self._new_image(ref=frame, is_frame=True) for frame in await self._cut(file)]
        for frame in self._frames:
            frame.start()
        await _all(self._encode(i, frame, allowance) for i, frame in enumerate(self._frames))
        indices = list(range(len(self._frames)))
        self._frame_size = self._frames[0].header.upright_size
        self.plan = self._planner.plan(self._video, indices, self._times(), self._frame_size)
        await self._load_pairs()

    async def _load_pairs(self) -> None:
        num_pairs = len(self.plan.indices) // PAIR
        known = [self._decoders.known_pairs.get(self._pair_key(pair)) for pair in range(num_pairs)]
        self.hashes = [digest or b"" for digest in known]
        self.sources = [self._file(self._frame(PAIR * pair).encoded) for pair in range(num_pairs)]
        new = [pair for pair in range(num_pairs) if known[pair] is None]
        if not new:
            return
        pixels = self._hold(await self._allocator.allocate_when_free(self.plan.pair_bytes * len(new)))
        pixels.used = pixels.capacity
        await _all(self._decode(pair, self._rgb(pixels, i)) for i, pair in enumerate(new))

    def _check_number(self, num_frames: int) -> None:
        """Check the number of frames, indices and timestamps. RequestError 400."""
        self._planner.check_frames(num_frames)
        for name, values in (("frames_indices", self._ref.indices), ("timestamps", self._ref.times)):
            if values is not None and len(values) != num_frames:
                raise RequestError(400, f"it has {num_frames} frames, but {len(values)} {name}", code="invalid_value")

    def _times(self) -> list[float]:
        ref = self._ref
        if ref.times is not None:
            return ref.times
        return [index / (ref.source_fps or DEFAULT_SOURCE_FPS) for index in ref.indices or range(len(self._frames))]

    async def _cut(self, file: MediaRef) -> list[MediaRef]:
        """Split `data:video/jpeg;base64,f1,f2` into frames. RequestError 400 if there are too many."""
        payload = file.payload
        if payload is None:
            header, _, texts = (file.url or "").partition(",")
            self._check_number(1 + texts.count(","))
            encoding = ";base64" if header.lower().rstrip().endswith(";base64") else ""
            return [MediaRef(url=f"data:{encoding},{text}") for text in texts.split(",")]
        text = np.frombuffer(self._sources.bodies.view(payload.offset, payload.length), np.uint8)
        commas = await run(self._sources.pool, lambda: self._find_commas(text))
        starts, ends = [0, *(comma + 1 for comma in commas)], [*commas, payload.length]
        pieces = zip(starts, ends, strict=True)
        return [MediaRef(WireRegion(payload.arena, payload.offset + start, end - start)) for start, end in pieces]

    def _find_commas(self, text: "npt.NDArray[np.uint8]") -> list[int]:
        pieces = [(start, text[start : start + PIECE_BYTES]) for start in range(0, len(text), PIECE_BYTES)]
        self._check_number(1 + sum(int(np.count_nonzero(piece == COMMA)) for _, piece in pieces))
        return [start + int(i) for start, piece in pieces for i in np.flatnonzero(piece == COMMA)]

    async def _encode(self, index: int, frame: Image, allowance: Allowance) -> None:
        with _frame_named(index):
            await frame.encode(allowance)

    def _frame(self, position: int) -> Image:
        """Return a frame by its position among those that the model gets."""
        return self._frames[self.plan.indices[position]]

    def _pair_key(self, pair: int) -> tuple[bytes, bytes, Size]:
        return self._frame(PAIR * pair).digest, self._frame(PAIR * pair + 1).digest, self.plan.size

    async def _make(self, item: int) -> None:
        pixels = self._hold(await self._allocator.allocate_when_free(self.plan.pair_bytes))
        pixels.used = pixels.capacity
        await self._decode(item, self._rgb(pixels, 0))

    async def _decode(self, pair: int, source: ImageSource) -> None:
        """Decode both frames of a pair to the region of `source`."""
        plan, place = self.plan, source.region
        half = plan.pair_bytes // PAIR
        for i in range(PAIR):
            with _frame_named(plan.indices[PAIR * pair + i]):
                frame = self._frame(PAIR * pair + i)
                size = await self._decoders.decode(frame.header, frame.encoded, (place.offset + i * half, half), plan.size, is_upright=True)
                if size != self._frame_size:
                    (height, width), (first_height, first_width) = size, self._frame_size
                    words = f"it has {width}x{height} pixels, the first frame has {first_width}x{first_height}"
                    raise RequestError(400, words, code="invalid_video")
        pixels, parameters = self._allocator.arena.view(place.offset, place.length), self._planner.pair_parameters
        self.hashes[pair] = await run(self._sources.pool, lambda: pair_hash(parameters, plan.size, pixels))
        self.sources[pair] = source
        self._decoders.known_pairs[self._pair_key(pair)] = self.hashes[pair]


async def _all(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Run these concurrently. Raises the first error, after the others are cancelled."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None


@contextlib.contextmanager
def _frame_named(index: int) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError.of(msgspec.structs.replace(error.info, message=f"frame {index + 1}: {error.info.message}")) from error


class Videos:
    """Maker of all videos, with the decoders of files. Create it inside a running event loop."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, inspector: Inspector, sources: Sources, images: Decoders,
        new_image: Callable[..., Image],
    ):  # fmt: skip
        self.decoders = VideoDecoders(config, sources.allocator.arena)
        planner, self._max_frames = VideoPlanner(config, checkpoint, inspector), config.max_video_frames
        self.new_file = partial(VideoFile, sources=sources, planner=planner, decoders=self.decoders)
        self.new_frames = partial(FrameList, sources=sources, planner=planner, decoders=images, new_image=new_image)

    def make(self, ref: VideoRef, image_of: Callable[..., Image]) -> Video:
        """Return a video; `image_of` returns the image of a reference."""
        if ref.file is not None and not ref.holds_frames:
            return self.new_file(ref=ref)
        frames = ref.frames[: self._max_frames + 1]  # more are refused when it is loaded
        return self.new_frames(ref=ref, frames=[image_of(frame, is_frame=True) for frame in frames])
