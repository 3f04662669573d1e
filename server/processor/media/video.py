"""Videos of requests, each owned by one object from its bytes to its release. A video is a list of frame pairs, each an item like an image
that is a file: its frames are decoded if the scheduler requests the pixels.

A pair's identity is that of its frames: their encoded bytes, or the file and their numbers in it.
"""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from engine.wire.arena import ALIGNMENT
from engine.wire.config import EngineConfig
from engine.wire.messages import PROCESSOR_ARENA, ImageSource, ImageSpan, MediaRef, Region, VideoRef
from models.config.types import MediaKind
from models.media.video import DEFAULT_SOURCE_FPS, VideoGeometry, time_text
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.decoders import Decoders
from server.processor.media.fetch import too_large
from server.processor.media.image import Image, decoded_bytes, naming
from server.processor.media.inspect import Allowance, Inspector
from server.processor.media.medium import release_all
from server.processor.media.sources import Sources
from server.processor.media.video_plan import PAIR, VideoPlan, VideoPlanner
from server.processor.text.prompt import Visual
from server.processor.threads import run, together
from server.region import GrowingRegion

CODES = {"invalid_image": "invalid_video", "image_too_large": "video_too_large"}
COMMA = ord(",")
NOWHERE = Region(PROCESSOR_ARENA, 0, 0)  # no other process reads a file
MAX_FRAMES = 4096
PIECE_BYTES = 1 << 20  # bytes that a thread searches without the interpreter lock


class Video(ABC):
    """One video of one request: see `Medium`."""

    kind: MediaKind = "video"
    plan: VideoPlan  # set, like `hashes`, by `load`
    hashes: list[bytes]

    def __init__(self, *, sources: Sources, planner: VideoPlanner, decoders: Decoders, ref: VideoRef):
        self._sources, self._planner, self._decoders, self._allocator = sources, planner, decoders, sources.allocator
        self._ref = ref
        self._video: VideoGeometry
        self.index = 0  # in its request

    async def begin(self) -> None:
        with self._naming():
            if not self._planner.takes_videos:
                raise RequestError(400, "this model does not support videos", code="invalid_value")
            await self._begin()

    async def load(self, allowance: Allowance) -> None:
        with self._naming():
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
        plan = self.plan
        return [
            ImageSpan(digest, start, plan.num_tokens, plan.grid, ImageSource("file", NOWHERE, *plan.size, num_frames=PAIR))
            for digest, start in zip(self.hashes, starts, strict=True)
        ]

    @property
    def item_bytes(self) -> int:
        return self.plan.pair_bytes

    async def decode(self, items: Sequence[int], offset: int) -> list[ImageSource]:
        size = self.plan.pair_bytes
        with self._naming():
            await self._decode(items, offset)
        places = [Region(PROCESSOR_ARENA, offset + i * size, size) for i in range(len(items))]
        return [ImageSource("rgb", place, *self.plan.size, num_frames=PAIR) for place in places]

    @property
    @abstractmethod
    def num_bytes(self) -> int: ...

    @abstractmethod
    def start(self) -> bool: ...

    @abstractmethod
    async def release(self) -> None: ...

    @abstractmethod
    async def _begin(self) -> None: ...

    @abstractmethod
    async def _load(self, allowance: Allowance) -> None:
        """Set plan and hashes."""

    @abstractmethod
    async def _decode(self, items: Sequence[int], offset: int) -> None: ...

    def _naming(self) -> "contextlib.AbstractContextManager[None]":
        return naming(f"Video {self.index + 1}", CODES)

    def _pairs(self, items: Iterable[int]) -> Iterator[int]:
        """Yield the indices of both frames of each pair."""
        for item in items:
            yield from self.plan.indices[PAIR * item : PAIR * (item + 1)]


class VideoFile(Video):
    """A video file from which frames are sampled."""

    _encoded: GrowingRegion | None = None

    @property
    def num_bytes(self) -> int:
        payload = self._payload
        return 0 if payload is None else decoded_bytes(payload)

    def start(self) -> bool:
        return self._payload is None

    async def release(self) -> None:
        if self._encoded is not None:
            self._allocator.free(self._encoded)
        self._encoded = None

    async def _begin(self) -> None:
        if (payload := self._payload) is not None:
            if decoded_bytes(payload) > self._planner.max_bytes + 3:
                raise too_large(self._planner.max_bytes)
            self._encoded = await self._allocator.allocate_when_free(decoded_bytes(payload))

    async def _load(self, allowance: Allowance) -> None:
        ref, clips, pool = self._ref, self._decoders.clips, self._sources.pool
        assert ref.file is not None
        if ref.file.payload is None:
            async with allowance.downloads:
                await self._sources.fetch(ref.file, self._hold, self._planner.max_bytes)
        assert self._encoded is not None
        encoded = self._encoded
        if ref.file.payload is not None:
            await run(pool, self._sources.unpacking(ref.file.payload, encoded))
        encoded.trim()
        digest = await run(pool, lambda: self._planner.inspector.identify(encoded.view, False))
        await self._sources.keep(ref.file.name, digest, encoded)
        clip = clips[digest] = clips.get(digest) or await self._decoders.look(encoded)
        fps = clip.fps or ref.source_fps or DEFAULT_SOURCE_FPS
        indices = self._video.sample(clip.num_frames, fps)
        self.plan = self._planner.plan(self._video, indices, [index / fps for index in indices], (clip.height, clip.width))
        pairs = range(len(self.plan.indices) // PAIR)
        self.hashes = [self._planner.identity(self.plan.size, digest, b"%d %d" % tuple(self._pairs([pair]))) for pair in pairs]

    async def _decode(self, items: Sequence[int], offset: int) -> None:
        assert self._encoded is not None
        await self._decoders.read(self._encoded, list(self._pairs(items)), offset, self.plan.size)

    @property
    def _payload(self) -> Region | None:
        return self._ref.file.payload if self._ref.file else None

    def _hold(self, region: GrowingRegion) -> GrowingRegion:
        self._encoded = region
        return region


class FrameList(Video):
    """A list of frames sent as images; the model gets all of them."""

    def __init__(self, *, new_image: Callable[..., Image], frames: list[Image], **shared: Any):
        super().__init__(**shared)
        self._new_image, self._frames = new_image, frames

    @property
    def num_bytes(self) -> int:
        payload = self._ref.file.payload if self._ref.file else None
        return sum(frame.num_bytes for frame in self._frames) if payload is None else decoded_bytes(payload) + MAX_FRAMES * ALIGNMENT

    def start(self) -> bool:
        return self._ref.file is None and all([frame.start() for frame in self._frames])

    async def release(self) -> None:
        await release_all(self._frames)

    async def _begin(self) -> None:
        file = self._ref.file
        if file is not None and not self._frames:
            self._frames = [self._new_image(ref=frame, is_frame=True) for frame in await self._cut(file)]
        self._check_number(len(self._ref.frames) or len(self._frames))
        for frame in self._frames:
            await frame.begin()

    async def _load(self, allowance: Allowance) -> None:
        ref, frames = self._ref, self._frames
        await together(*(self._encode(i, frame, allowance) for i, frame in enumerate(frames)))
        first = frames[0].header
        for i, header in enumerate(frame.header for frame in frames):
            if (header.height, header.width) != (first.height, first.width):
                words = f"it has {header.width}x{header.height} pixels, the first frame has {first.width}x{first.height}"
                raise RequestError(400, f"frame {i + 1}: {words}", code="invalid_video")
        times = ref.times or [index / (ref.source_fps or DEFAULT_SOURCE_FPS) for index in ref.indices or range(len(frames))]
        self.plan = self._planner.plan(self._video, list(range(len(frames))), times, (first.height, first.width))
        pairs = range(len(self.plan.indices) // PAIR)
        self.hashes = [self._planner.identity(self.plan.size, *(frames[i].digest for i in self._pairs([pair]))) for pair in pairs]

    async def _encode(self, index: int, frame: Image, allowance: Allowance) -> None:
        with _frame_named(index):
            await frame.encode(allowance)

    async def _decode(self, items: Sequence[int], offset: int) -> None:
        half = self.plan.pair_bytes // PAIR
        await together(*(self._decode_frame(index, offset + i * half) for i, index in enumerate(self._pairs(items))))

    async def _decode_frame(self, index: int, offset: int) -> None:
        frame = self._frames[index]
        assert frame.encoded is not None
        with _frame_named(index):
            await self._decoders.decode(frame.header, frame.encoded, offset, self.plan.size)

    def _check_number(self, num_frames: int) -> None:
        """Check the number of frames, indices and timestamps. RequestError 400."""
        self._planner.check_frames(num_frames)
        for name, values in (("frames_indices", self._ref.indices), ("timestamps", self._ref.times)):
            if values is not None and len(values) != num_frames:
                raise RequestError(400, f"it has {num_frames} frames, but {len(values)} {name}", code="invalid_value")

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
        return [MediaRef(Region(payload.arena, payload.offset + start, end - start)) for start, end in pieces]

    def _find_commas(self, text: "npt.NDArray[np.uint8]") -> list[int]:
        pieces = [(start, text[start : start + PIECE_BYTES]) for start in range(0, len(text), PIECE_BYTES)]
        self._check_number(1 + sum(int(np.count_nonzero(piece == COMMA)) for _, piece in pieces))
        return [start + int(i) for start, piece in pieces for i in np.flatnonzero(piece == COMMA)]


@contextlib.contextmanager
def _frame_named(index: int) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError.of(msgspec.structs.replace(error.info, message=f"frame {index + 1}: {error.info.message}")) from error


class Videos:
    """Maker of all videos."""

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, inspector: Inspector, sources: Sources, decoders: Decoders,
        new_image: Callable[..., Image],
    ):  # fmt: skip
        self._max_frames = config.max_video_frames
        shared: dict[str, Any] = {"sources": sources, "planner": VideoPlanner(config, checkpoint, inspector), "decoders": decoders}
        self.new_file = partial(VideoFile, **shared)
        self.new_frames = partial(FrameList, new_image=new_image, **shared)

    def make(self, ref: VideoRef, image_of: Callable[..., Image]) -> Video:
        """Return a video; `image_of` returns the image of a reference."""
        if ref.file is not None and not ref.holds_frames:
            return self.new_file(ref=ref)
        frames = ref.frames[: self._max_frames + 1]  # more are refused when it is loaded
        return self.new_frames(ref=ref, frames=[image_of(frame, is_frame=True) for frame in frames])
