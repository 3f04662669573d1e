"""Reading of headers, and decoding of images other than baseline JPEGs, by Pillow. Errors of its codecs become RequestErrors with our own
texts."""

import hashlib
import io
import math
import struct

from PIL import Image, UnidentifiedImageError
from PIL.TiffImagePlugin import TiffImageFile

from server.errors import invalid_image

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
ORIENTATION_TAG = 0x0112
TILE_TAGS = (322, 323)  # TIFF tags: width and length of tiles
MAX_TILE_PIXELS = 1 << 22  # tiles may be larger than the image, and are decoded whole
TRANSPOSITIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
DAMAGED_METADATA = (SyntaxError, ValueError, OSError, KeyError, IndexError, TypeError, AttributeError, struct.error)

Image.MAX_IMAGE_PIXELS = None  # `check_size` of inspect.py is the limit; Pillow's own would warn below it


def read_header(data: memoryview) -> tuple[int, int, int]:
    """Return height and width, upright, and the orientation (EXIF 1-8). Allocates no pixels. RequestError 422."""
    with _open(data) as image:
        if isinstance(image, TiffImageFile):
            if _tile_pixels(image) > max(MAX_TILE_PIXELS, image.height * image.width):
                raise invalid_image("its tiles are much larger than the image")
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


def framed_hash(*fields: bytes | memoryview) -> bytes:
    """Return the sha256 of length-framed fields, so that different fields cannot have the same encoding."""
    digest = hashlib.sha256()
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()


def _open(data: memoryview) -> Image.Image:
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise invalid_image(f"its format is not one of {', '.join(FORMATS)}") from error
    except Exception as error:
        raise invalid_image("its header is malformed") from error


def _tile_pixels(image: TiffImageFile) -> int:
    try:
        return math.prod([int(image.tag_v2.get(tag, 0)) for tag in TILE_TAGS])
    except DAMAGED_METADATA as error:
        raise invalid_image("its header is malformed") from error


def _orientation(image: Image.Image) -> int:
    try:
        value = Image.Image.getexif(image).get(ORIENTATION_TAG, 1)  # PngImageFile.getexif would decode the pixels
    except DAMAGED_METADATA:
        return 1
    return value if value in TRANSPOSITIONS else 1
