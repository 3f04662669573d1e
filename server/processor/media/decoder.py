"""Guest that decodes images by Pillow and videos by PyAV: it reads encoded files in the processor's arena and writes their pixels there.
Errors of codecs become RequestErrors with our own texts."""

import io
import logging
import warnings
from collections.abc import Callable

import msgspec
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from engine.wire.arena import ArenaView
from server.errors import RequestError, invalid_image
from server.processor.media.decoders import Clip, Job, Limits, VideoJob

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
ORIENTATION_TAG = 0x0112
TURN = Image.Transpose
TRANSPOSITIONS = {
    2: TURN.FLIP_LEFT_RIGHT, 3: TURN.ROTATE_180, 4: TURN.FLIP_TOP_BOTTOM, 5: TURN.TRANSPOSE, 6: TURN.ROTATE_270, 7: TURN.TRANSVERSE,
    8: TURN.ROTATE_90,
}  # fmt: skip

Image.MAX_IMAGE_PIXELS = None  # `Images.checked` is the limit; Pillow's own would warn below it


def prepare(arena_fd: str, arena_size: str, limits: str) -> Callable[[bytes], bytes]:
    """Return the guest's function. `limits`: JSON of Limits. Its answers are pairs of the result and the ErrorInfo of a RequestError."""
    warnings.simplefilter("ignore")  # a defect of an image concerns only its client
    logging.disable()
    arena, read_limits = ArenaView(int(arena_fd), int(arena_size), writable=True), msgspec.json.decode(limits, type=Limits)

    def run(job: bytes) -> bytes:
        try:
            return msgspec.msgpack.encode((answer(arena, msgspec.msgpack.decode(job, type=Job | VideoJob), read_limits), None))
        except RequestError as error:
            return msgspec.msgpack.encode((None, error.info))

    return run


def answer(arena: ArenaView, job: Job | VideoJob, limits: Limits) -> tuple[int, ...] | Clip | None:
    """Return what `read_header` or an inspection of a video returns, or None after decoding. RequestError."""
    data = arena.view(*job.encoded)
    if isinstance(job, VideoJob):
        from server.processor.media import video_file  # FFmpeg, which images do not need

        return video_file.answer(arena, job, limits)
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
