"""Video files in the processor's arena, read by PyAV in a guest: they are inspected, and wanted frames are written there as RGB.

Frames are counted as by the reference's decoder: packets that are presented, in the order of their times. The rate is their number divided
by the time from the start of the first frame to the end of the last one."""

import contextlib
import io
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import av
import av.error
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from PIL import Image

from engine.wire.arena import ArenaView
from server.errors import RequestError
from server.processor.media.decoders import Clip, Limits, VideoJob, invalid_video

CODECS = "h264,hevc,vp8,libvpx,vp9,libvpx-vp9,av1,libdav1d,mpeg4,mjpeg,gif"  # FFmpeg's decoders that files may use
SKIPPING = frozenset({"h264", "hevc"})  # codecs with one frame per packet, whose non-reference frames can be skipped
QUEUED_PIXELS = 1 << 25  # limit of frames that wait for resizing or are being resized
SEEK_FRAMES = 8  # a seek is worth it if it skips more frames
ROTATE = Image.Transpose
ROTATIONS = {90: ROTATE.ROTATE_90, 180: ROTATE.ROTATE_180, -180: ROTATE.ROTATE_180, -90: ROTATE.ROTATE_270}
ONLY = {"format_whitelist": "mov,matroska,gif,avi", "protocol_whitelist": "none"}  # some formats open other files


@dataclass(frozen=True, slots=True)
class Scan:
    """Times of all frames in units of the stream, ascending; and for each frame where decoding can start, its time and the seek
    position."""

    times: list[int]
    key_times: list[int]
    seek_times: list[int]
    fps: float | None


def answer(arena: ArenaView, job: VideoJob, limits: Limits) -> Clip | None:
    """Return the result of an inspection, or None after decoding. RequestError."""
    data, size = arena.view(*job.encoded), 3 * job.size[0] * job.size[1]
    try:
        if not job.wanted:
            return look(data, limits)
        read_frames(data, limits, job.wanted, job.size, arena.view(job.target, size * len(job.wanted)))
    except MemoryError:
        raise invalid_video(f"decoding it needs more than {limits.memory >> 20} MiB") from None
    return None


def look(data: memoryview, limits: Limits) -> Clip:
    """Inspect a file; decode one frame. RequestError 400, 413 or 422 with a text that follows "Video n: "."""
    with _opened(data, limits) as (container, stream):
        scan = _scan(container, stream, limits)
        first = next(_decoded_from(container, stream, scan.seek_times[0]), None)
        if first is None:
            raise invalid_video("none of its frames can be decoded")
        height, width = (first.width, first.height) if first.rotation in (90, -90) else (first.height, first.width)
        return Clip(len(scan.times), scan.fps, height, width)


def read_frames(data: memoryview, limits: Limits, wanted: list[int], size: tuple[int, int], target: memoryview) -> None:
    """Write the frames `wanted` (ascending) consecutively to `target`, upright and resized to `size` (height, width). Several threads
    resize while further frames are decoded. Errors as in `look`."""
    frame_bytes = len(target) // len(wanted)
    with _opened(data, limits) as (container, stream), ThreadPoolExecutor(limits.threads) as pool:
        scan = _scan(container, stream, limits)
        if wanted[-1] >= len(scan.times):
            raise invalid_video("its content changed while it was read")
        decoded = _wanted_frames(container, stream, scan, sorted(set(wanted)))
        most = min(4 * limits.threads, QUEUED_PIXELS // (stream.width * stream.height))
        running: deque[Future[None]] = deque()
        frame, previous = None, -1
        for i, index in enumerate(wanted):
            frame = frame if frame is not None and index == previous else next(decoded)
            previous = index
            running.append(pool.submit(_write, frame, size, target[i * frame_bytes : (i + 1) * frame_bytes]))
            if len(running) > most:
                running.popleft().result()
        for future in running:
            future.result()


@contextlib.contextmanager
def _opened(data: memoryview, limits: Limits) -> Iterator[tuple[InputContainer, VideoStream]]:
    """Open the file. Every error of FFmpeg becomes a RequestError with our own text."""
    try:
        opened = av.open(io.BytesIO(data), options=ONLY)
    except (av.error.FFmpegError, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, MemoryError):
            raise
        raise invalid_video("it is damaged, or its format is not one of MP4, MOV, WebM, MKV, AVI, GIF") from error
    try:
        with opened as container:
            yield cast("InputContainer", container), _stream_of(cast("InputContainer", container), limits)
    except (av.error.FFmpegError, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, RequestError | MemoryError):
            raise
        raise invalid_video("it is damaged") from error


def _stream_of(container: InputContainer, limits: Limits) -> VideoStream:
    covers = av.stream.Disposition.attached_pic
    stream = next((stream for stream in container.streams.video if not stream.disposition & covers), None)
    if stream is None:
        raise invalid_video("it has no video stream")
    context = stream.codec_context
    if context is None or context.width * context.height == 0:
        raise invalid_video("its codec or the size of its frames is not supported")
    if context.width * context.height > limits.frame_pixels:
        words = f"its frames have {context.width}x{context.height} pixels, the limit is {limits.frame_pixels}"
        raise RequestError(400, words, code="video_too_large")
    context.options = {"max_pixels": str(limits.frame_pixels), "codec_whitelist": CODECS}
    context.thread_type = "AUTO"
    context.thread_count = limits.threads
    return stream


def _scan(container: InputContainer, stream: VideoStream, limits: Limits) -> Scan:
    times: list[int] = []
    keys: list[tuple[int, int]] = []
    end = 0
    for packet in container.demux(stream):
        if packet.size == 0:
            continue  # the end
        if packet.is_corrupt:
            raise invalid_video("it is truncated")
        time = packet.dts if packet.pts is None else packet.pts
        time = len(times) if time is None else time
        if packet.is_keyframe:
            keys.append((time, time if packet.dts is None else packet.dts))
        if not packet.is_discard:
            times.append(time)
            end = max(end, time + (packet.duration or 0))
        if len(times) > limits.file_frames:
            raise RequestError(413, f"it has more than {limits.file_frames} frames", code="video_too_large")
    if not times or not keys:
        raise invalid_video("it has no frames")
    times.sort()
    keys.sort()
    seconds = float((end - times[0]) * stream.time_base) if stream.time_base else 0.0
    header_rate = float(stream.average_rate) if stream.average_rate else None
    return Scan(times, [time for time, _ in keys], [seek for _, seek in keys], len(times) / seconds if seconds > 0 else header_rate)


def _wanted_frames(container: InputContainer, stream: VideoStream, scan: Scan, wanted: list[int]) -> Iterator[VideoFrame]:
    """Yield the frames with these ascending indices. For each index it is the last frame that begins no later than the scan's time."""
    times = {scan.times[index] for index in wanted}
    position = -1  # index of the previous frame
    frames: Iterator[VideoFrame] = iter(())
    shown: VideoFrame | None = None
    upcoming: VideoFrame | None = None
    for index in wanted:
        time = scan.times[index]
        key = max(0, bisect_right(scan.key_times, time) - 1)
        if position < 0 or bisect_right(scan.times, scan.key_times[key]) - 1 - position > SEEK_FRAMES:
            frames, shown = _decoded_from(container, stream, scan.seek_times[key], times), None
            upcoming = next(frames, None)
            if upcoming is None or _time_of(upcoming) > time:  # some files have leading frames after keyframes
                frames = _decoded_from(container, stream, scan.seek_times[0], times)
                upcoming = next(frames, None)
        while upcoming is not None and _time_of(upcoming) <= time:
            shown, upcoming = upcoming, next(frames, None)
        found = shown or upcoming
        if found is None:
            raise invalid_video(f"its frame {index} cannot be decoded")
        position = index
        yield found


def _decoded_from(container: InputContainer, stream: VideoStream, time: int, wanted: Container[int] = ()) -> Iterator[VideoFrame]:
    """Yield frames from the keyframe at `time` on. With `wanted` times, frames at other times may be missing."""
    container.seek(time, stream=stream)
    context, size = stream.codec_context, None
    may_skip = bool(wanted) and context.codec.canonical_name in SKIPPING
    for packet in container.demux(stream):
        if may_skip:
            context.skip_frame = "DEFAULT" if packet.pts is None or packet.pts in wanted else "NONREF"
        for frame in packet.decode():
            assert isinstance(frame, VideoFrame)
            size = size or (frame.width, frame.height)
            if (frame.width, frame.height) != size:
                words = f"its frames change their size, from {size[0]}x{size[1]} to {frame.width}x{frame.height}"
                raise invalid_video(words)
            yield frame


def _time_of(frame: VideoFrame) -> int:
    time = frame.dts if frame.pts is None else frame.pts
    if time is None:
        raise invalid_video("its frames have no timestamps")
    return time


def _write(frame: VideoFrame, size: tuple[int, int], target: memoryview) -> None:
    image = frame.to_image(threads=1)  # default: one per CPU, whose stacks count as memory
    if frame.rotation in ROTATIONS:
        image = image.transpose(ROTATIONS[frame.rotation])
    if (image.height, image.width) != size:
        image = image.resize((size[1], size[0]), Image.Resampling.BICUBIC)
    target[:] = np.asarray(image).reshape(-1).data
