"""Guest that decodes images by Pillow: it reads encoded images in the processor's arena and writes their pixels there. Also jobs of all
decoders. Errors of codecs become RequestErrors with our own texts."""

import functools
import io
import logging
import warnings
from collections.abc import Callable
from typing import TypeVar

import msgspec
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from engine.wire.arena import ArenaView
from server.errors import RequestError, invalid_image

invalid_video = functools.partial(RequestError, 422, code="invalid_video")
MEMORY_BYTES = 4 << 30  # memory limit of a guest; more fails the image
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
ORIENTATION_TAG = 0x0112
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

Image.MAX_IMAGE_PIXELS = None  # `Images.checked` is the limit; Pillow's own would warn below it

T = TypeVar("T")


class Job(msgspec.Struct, frozen=True, array_like=True):
    """Write pixels to `target`, upright by `orientation` (EXIF) and resized to `size` (height, width). Without `target`, only read the
    header."""

    encoded: tuple[int, int]  # offset, length
    target: int | None = None  # offset
    size: tuple[int, int] = (0, 0)
    orientation: int = 1


class VideoLimits(msgspec.Struct, frozen=True, array_like=True):
    """Limits: pixels per frame, frames per file, memory of a decoder in bytes, and its threads; as many threads resize its frames."""

    frame_pixels: int
    file_frames: int
    memory: int
    threads: int


class VideoJob(msgspec.Struct, frozen=True, array_like=True):
    """Write the frames `wanted` (ascending indices) to `target`, resized to `size` (height, width). If `wanted` is empty, only inspect the
    file."""

    encoded: tuple[int, int]  # offset, length
    wanted: list[int] = []
    target: int = 0  # offset
    size: tuple[int, int] = (0, 0)


class Clip(msgspec.Struct, frozen=True, array_like=True):
    """Number of frames in a file, their rate if the file states it, and the size of the first frame, upright."""

    num_frames: int
    fps: float | None
    height: int
    width: int


def prepare(arena_fd: str, arena_size: str) -> Callable[[bytes], bytes]:
    warnings.simplefilter("ignore")  # a defect of an image concerns only its client
    return arena_guest(arena_fd, arena_size, Job, answer)


def arena_guest(arena_fd: str, arena_size: str, kind: type[T], answer: Callable[[ArenaView, T], object]) -> Callable[[bytes], bytes]:
    """Return the function of a guest that answers jobs of this kind about data in the arena. Its answers are pairs
    of the result and the ErrorInfo of a RequestError."""
    logging.disable()
    arena = ArenaView(int(arena_fd), int(arena_size), writable=True)

    def run(job: bytes) -> bytes:
        try:
            return msgspec.msgpack.encode((answer(arena, msgspec.msgpack.decode(job, type=kind)), None))
        except RequestError as error:
            return msgspec.msgpack.encode((None, error.info))

    return run


def answer(arena: ArenaView, job: Job) -> tuple[int, ...] | None:
    """Return what `read_header` returns, or None after decoding."""
    data = arena.view(*job.encoded)
    if job.target is None:
        return read_header(data)
    decode_rgb(data, arena.view(job.target, 3 * job.size[0] * job.size[1]), job.size, job.orientation)
    return None


def read_header(data: memoryview) -> tuple[int, int, int]:
    """Return height and width, upright, and the orientation (EXIF 1-8). Allocates no pixels. RequestError 422."""
    with _open(data) as image:
        if isinstance(image, TiffImageFile):
            return image.height, image.width, 1  # Pillow rotates it
        orientation = _orientation(image)
        return (image.width, image.height, orientation) if orientation >= 5 else (image.height, image.width, orientation)


def read_orientation(data: memoryview) -> int:
    """Return the orientation (1-8) from EXIF or XMP; damaged metadata count as 1."""
    with _open(data) as image:
        return _orientation(image)


def decode_rgb(data: memoryview, target: memoryview, size: tuple[int, int], orientation: int) -> None:
    """Write the first frame to `target`: rotated by `orientation`, RGB, resized to `size` (height, width). RequestError 422."""
    with _open(data) as image:
        kind = image.format
        try:
            image.load()
            upright = image.transpose(TRANSPOSITIONS[orientation]) if orientation in TRANSPOSITIONS else image
            if upright is not image:
                image.close()  # at most two copies at a time
            rgb = upright if upright.mode == "RGB" else upright.convert("RGB")
            if (rgb.height, rgb.width) != size:
                rgb = rgb.resize(size[::-1], Image.Resampling.BICUBIC)
            target[:] = rgb.tobytes()
        except Exception as error:
            raise invalid_image(f"it cannot be decoded as {kind}") from error


def _open(data: memoryview) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:
        raise invalid_image(f"its format is not one of {', '.join(FORMATS)}, or its header is malformed") from error


def _orientation(image: Image.Image) -> int:
    try:
        value = Image.Image.getexif(image).get(ORIENTATION_TAG, 1)  # PngImageFile.getexif would decode the pixels
    except Exception:  # damaged metadata
        return 1
    return value if value in TRANSPOSITIONS else 1
