"""Size, limits and identity of an image, from its encoded bytes. The cost of every function is bounded, whatever the bytes are."""

import dataclasses
import hashlib
from dataclasses import dataclass

import msgspec

from engine.wire.config import EngineConfig
from engine.wire.jpeg import parse_plain_jpeg
from engine.wire.messages import MediaRef
from models.media.geometry import Grid, VisionGeometry
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.decoder import read_orientation

PROCESSING_VERSION = 1  # part of every image's identity: increment it when the same bytes give different pixels
MAX_JPEG_PIXELS = 1 << 25  # maximum for a GPU, which takes 3 bytes per pixel; larger images are decoded by the processor
MAX_JPEG_PIXELS_HOST = 1 << 18  # maximum for a worker without a GPU decoder: a few milliseconds
SMALL_PIXELS = 1 << 18  # up to this size an image is not resized by the processor


@dataclass(frozen=True, slots=True)
class Header:
    """Header of an image; the size is after `orientation` (EXIF)."""

    stays_encoded: bool
    height: int
    width: int
    orientation: int = 1

    @property
    def num_pixels(self) -> int:
        return self.height * self.width


class Inspector:
    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, gpu_decodes: bool):
        self._max_jpeg_pixels = MAX_JPEG_PIXELS if gpu_decodes else MAX_JPEG_PIXELS_HOST
        self.geometry = checkpoint.model.geometry
        self._max_pixels = config.max_image_pixels
        geometry = self.geometry = self.geometry_of(MediaRef(min_pixels=config.min_pixels, max_pixels=config.max_pixels))
        sizes = (geometry.patch_size, geometry.merge_size, geometry.temporal_patch_size, geometry.min_pixels, geometry.max_pixels)
        self._parameters = msgspec.msgpack.encode((PROCESSING_VERSION, sizes))

    def plain_header(self, data: memoryview) -> Header | None:
        """Return the header of a JPEG that stays encoded, None for other files. RequestError 400 or 422 with a text that follows "Image n:
        "."""
        plain = parse_plain_jpeg(data)
        if plain is None or plain.height * plain.width > self._max_jpeg_pixels:
            return None
        orientation = read_orientation(data) if plain.has_metadata else 1
        height, width = (plain.width, plain.height) if orientation >= 5 else (plain.height, plain.width)
        self.check_size(height, width)
        return Header(True, height, width, orientation)

    def check_size(self, height: int, width: int) -> None:
        """RequestError 400 for too many pixels."""
        if height * width > self._max_pixels:
            raise RequestError(400, f"it has {width}x{height} pixels, the limit is {self._max_pixels}", code="image_too_large")

    def geometry_of(self, ref: MediaRef) -> VisionGeometry:
        """Return the geometry with the request's pixel limits for this image, which override the server's. RequestError 400."""
        least = ref.min_pixels or min(self.geometry.min_pixels, ref.max_pixels or self.geometry.min_pixels)
        most = ref.max_pixels or max(self.geometry.max_pixels, least)
        if ref.cap is not None:
            least, most = min(least, ref.cap), min(most, ref.cap)
        if least > most:
            raise RequestError(400, f"its min_pixels of {least} exceed its max_pixels of {most}", code="invalid_value")
        return dataclasses.replace(self.geometry, min_pixels=least, max_pixels=most)

    def grid(self, geometry: VisionGeometry, height: int, width: int) -> Grid:
        """Return the patch grid; the transposed shape gives the same number of tokens. RequestError 400 for an unsupported shape."""
        try:
            return geometry.grid(height, width)
        except ValueError as error:
            raise RequestError(400, str(error), code="unsupported_image") from None

    def size_for_workers(self, geometry: VisionGeometry, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) to which the processor decodes an image: its own, or, if that is much larger, the size to which
        workers would resize it."""
        _, rows, columns = self.grid(geometry, height, width)
        target = rows * geometry.patch_size, columns * geometry.patch_size
        return target if height * width > max(SMALL_PIXELS, 2 * target[0] * target[1]) else (height, width)

    def identity(self, digest: bytes, geometry: VisionGeometry) -> bytes:
        """Return the identity of an image: the digest itself under the server's own limits."""
        if geometry == self.geometry:
            return digest
        limits = geometry.min_pixels.to_bytes(8, "little") + geometry.max_pixels.to_bytes(8, "little")
        return hashlib.sha256(digest + limits).digest()

    def identify(self, data: memoryview, stays_encoded: bool) -> bytes:
        """Return the hash of an image's bytes and of the parameters of its processing."""
        return framed_hash(b"jpeg" if stays_encoded else b"rgb", self._parameters, data)


def framed_hash(*fields: bytes | memoryview) -> bytes:
    """Return the sha256 of length-framed fields, so that different fields cannot have the same encoding."""
    digest = hashlib.sha256()
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)
    return digest.digest()
