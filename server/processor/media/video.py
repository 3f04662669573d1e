"""Videos of requests, each owned by one object from its bytes to its release. A video is a list of frame pairs, each an item like an image
that is a file: its frames are decoded if the scheduler requests the pixels.

A pair's identity is that of its frames: their encoded bytes, or the file and their numbers in it.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.wire.arena import ArenaFull
from engine.wire.config import EngineConfig
from engine.wire.messages import PROCESSOR_ARENA, ImageSource, ImageSpan, MediaRef, Region, VideoRef
from models.config.types import MediaKind
from models.config.video import read_video_geometry
from models.media.geometry import Grid
from models.media.video import DEFAULT_SOURCE_FPS, VideoGeometry, time_text
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.decoders import Size
from server.processor.media.fetch import too_large
from server.processor.media.image import Image, Images, naming
from server.processor.media.sources import File, decoded_bytes, release_all, together
from server.processor.text.prompt import Visual

COMMA = ord(",")
NOWHERE = Region(PROCESSOR_ARENA, 0, 0)  # no other process reads a file
PAIR = 2  # frames of an item


@dataclass(frozen=True, slots=True)
class VideoPlan:
    """Selected frames (an even number), their size, the grid and the number of tokens per pair, and the time of each pair."""

    indices: list[int]
    size: Size  # of a frame
    grid: Grid
    num_tokens: int
    times: list[float]

    @property
    def pair_bytes(self) -> int:
        return PAIR * 3 * self.size[0] * self.size[1]


class Videos:
    """Limits and geometry of videos, and maker of them."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, images: Images):
        self.images, self.sources, self.decoders = images, images.sources, images.decoders
        self.max_bytes = config.max_video_bytes
        self._max_frames = config.max_video_frames
        self._usual = read_video_geometry(checkpoint.folder, checkpoint.model.geometry)

    def make(self, ref: VideoRef, image_of: Callable[[MediaRef], Image]) -> "VideoFile | FrameList":
        """Return a video; `image_of` returns the image of a reference."""
        if ref.file is not None and not ref.holds_frames:
            return VideoFile(self, ref, ref.file)
        frames = ref.frames[: self._max_frames + 1]  # more are refused when it is loaded
        return FrameList(self, ref, [image_of(frame) for frame in frames])

    def geometry_of(self, ref: VideoRef) -> VideoGeometry:
        """Return the checkpoint's geometry with the request's limits; a rate replaces a number of frames. RequestError 400."""
        usual = self._usual
        least = ref.min_pixels or min(usual.min_pixels, ref.max_pixels or usual.min_pixels)
        most = ref.max_pixels or max(usual.max_pixels, least)
        if least > most:
            raise RequestError(400, f"its min_pixels of {least} exceed its max_pixels of {most}", code="invalid_value")
        changes: dict[str, Any] = {name: value for name in ("fps", "num_frames", "samples") if (value := getattr(ref, name)) is not None}
        if ref.fps is not None:
            changes["num_frames"] = None
        return dataclasses.replace(usual, min_pixels=least, max_pixels=most, **changes)

    def check_frames(self, num_frames: int) -> None:
        """Raise RequestError 400 for too many frames."""
        if num_frames > self._max_frames:
            words = f"{num_frames} of its frames would be sampled, the limit is {self._max_frames}: lower fps or num_frames"
            raise RequestError(400, words, code="video_too_large")

    def plan(self, video: VideoGeometry, indices: list[int], times: list[float], size: Size) -> VideoPlan:
        """Return the plan for these frames of this size. RequestError 400 for an unsupported shape, or for too many frames."""
        num_frames = len(indices)
        self.check_frames(num_frames)
        try:
            _, rows, columns = video.grid(num_frames, *size)
        except ValueError as error:
            raise RequestError(400, str(error), code="invalid_video") from None
        return VideoPlan(
            indices=[*indices, *[indices[-1]] * (num_frames % PAIR)], size=(rows * video.patch_size, columns * video.patch_size),
            grid=(1, rows, columns), num_tokens=self.images.geometry.num_tokens((1, rows, columns)),
            times=video.pair_times(times),
        )  # fmt: skip


class Video:
    """One video of one request, with the interface of `Image`. `load` sets plan and hashes."""

    kind: MediaKind = "video"
    index = 0  # in its request
    plan: VideoPlan
    hashes: list[bytes]

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

    def _sources(self, items: Sequence[int], offset: int) -> list[ImageSource]:
        size = self.plan.pair_bytes
        places = [Region(PROCESSOR_ARENA, offset + i * size, size) for i in range(len(items))]
        return [ImageSource("rgb", place, *self.plan.size, num_frames=PAIR) for place in places]

    def _pairs(self, items: Iterable[int]) -> Iterator[int]:
        """Yield the indices of both frames of each pair."""
        for item in items:
            yield from self.plan.indices[PAIR * item : PAIR * (item + 1)]


class VideoFile(Video):
    """A video file from which frames are sampled."""

    def __init__(self, videos: Videos, ref: VideoRef, file: MediaRef):
        self._videos, self._ref, self.file = videos, ref, File(videos.sources, file)
        self.num_bytes = self.file.num_bytes

    def start(self) -> bool:
        return self.file.start()

    async def load(self) -> None:
        videos, payload, most = self._videos, self.file.ref.payload, self._videos.max_bytes
        with naming(f"Video {self.index + 1}"):
            geometry = videos.geometry_of(self._ref)
            if payload is not None and decoded_bytes(payload) > most + 3:
                raise too_large(most)
            encoded = await self.file.load(most)
            digest, clips = self.file.digest, videos.decoders.clips
            clip = clips[digest] = clips.get(digest) or await videos.decoders.look(encoded)
            fps = clip.fps or DEFAULT_SOURCE_FPS
            indices = geometry.sample(clip.num_frames, fps)
            self.plan = videos.plan(geometry, indices, [index / fps for index in indices], (clip.height, clip.width))
        pairs = range(len(self.plan.indices) // PAIR)
        self.hashes = [identity(self.plan.size, digest, b"%d %d" % tuple(self._pairs([pair]))) for pair in pairs]

    async def decode(self, items: Sequence[int], offset: int) -> list[ImageSource]:
        assert self.file.encoded is not None
        with naming(f"Video {self.index + 1}"):
            await self._videos.decoders.read(self.file.encoded, list(self._pairs(items)), offset, self.plan.size)
        return self._sources(items, offset)

    async def release(self) -> None:
        await self.file.release()


class FrameList(Video):
    """A list of frames sent as images; the model gets all of them. Frames separated by commas become images when they are loaded."""

    def __init__(self, videos: Videos, ref: VideoRef, frames: list[Image]):
        self._videos, self._ref, self._frames = videos, ref, frames
        self.num_bytes = sum(frame.num_bytes for frame in frames)

    def start(self) -> bool:
        return all([frame.start() for frame in self._frames])

    async def load(self) -> None:
        videos, ref = self._videos, self._ref
        with naming(f"Video {self.index + 1}"):
            geometry = videos.geometry_of(ref)
            if ref.file is not None:
                self._frames = [Image(videos.images, frame) for frame in await self._cut(ref.file)]
                if not self.start():
                    raise ArenaFull
            frames = self._frames
            videos.check_frames(len(ref.frames) or len(frames))
            encoded = await together(*(frame.encode() for frame in frames))
            first, *sizes = [(header.height, header.width) for _, header in encoded]
            if (other := next((size for size in sizes if size != first), None)) is not None:
                words = f"its frames differ in size: {first[1]}x{first[0]} and {other[1]}x{other[0]} pixels"
                raise RequestError(400, words, code="invalid_video")
            times = [index / (ref.fps or DEFAULT_SOURCE_FPS) for index in range(len(frames))]
            self.plan = videos.plan(geometry, list(range(len(frames))), times, first)
        pairs = range(len(self.plan.indices) // PAIR)
        self.hashes = [identity(self.plan.size, *(frames[i].file.digest for i in self._pairs([pair]))) for pair in pairs]

    async def decode(self, items: Sequence[int], offset: int) -> list[ImageSource]:
        half, size = self.plan.pair_bytes // PAIR, self.plan.size
        with naming(f"Video {self.index + 1}"):
            await together(*(self._frames[index].write(offset + i * half, size) for i, index in enumerate(self._pairs(items))))
        return self._sources(items, offset)

    async def release(self) -> None:
        await release_all(self._frames)

    async def _cut(self, file: MediaRef) -> list[MediaRef]:
        """Split `data:video/jpeg;base64,f1,f2` into frames. RequestError 400 if there are too many."""
        payload, videos = file.payload, self._videos
        if payload is None:
            header, _, texts = (file.url or "").partition(",")
            videos.check_frames(1 + texts.count(","))
            encoding = ";base64" if header.lower().rstrip().endswith(";base64") else ""
            return [MediaRef(url=f"data:{encoding},{text}") for text in texts.split(",")]
        text = np.frombuffer(videos.sources.bodies.view(payload.offset, payload.length), np.uint8)

        def find_commas() -> list[int]:
            is_comma = text == COMMA
            videos.check_frames(1 + int(np.count_nonzero(is_comma)))
            return [int(position) for position in np.flatnonzero(is_comma)]

        commas = await videos.sources.run(find_commas)
        starts, ends = [0, *(comma + 1 for comma in commas)], [*commas, payload.length]
        return [MediaRef(Region(payload.arena, payload.offset + start, end - start)) for start, end in zip(starts, ends, strict=True)]


Medium = Image | VideoFile | FrameList


def identity(size: Size, *sources: bytes) -> bytes:
    """Return the hash of a pair of frames of this size from these sources: digests of two frames, or a file's digest and their numbers."""
    return hashlib.sha256(b"pair of %dx%d " % size + b"".join(sources)).digest()
