"""Pictures in every form that clients send, made with Pillow. Used by the media tests."""

import io
import struct
import zlib

import numpy as np
from PIL import Image


def pixels(height: int = 48, width: int = 80, seed: int = 0) -> Image.Image:
    """A smooth RGB picture with some noise: different in every corner, so that a rotation shows."""
    y, x = np.mgrid[0:height, 0:width]
    noise = np.random.default_rng(seed).integers(0, 30, (height, width))
    channels = [(x * 3 + noise) % 256, (y * 4 + noise) % 256, (x + y + noise) % 256]
    return Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def save(image: Image.Image, format: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format, **options)
    return file.getvalue()


def turned(format: str, orientation: int, image: Image.Image | None = None, **options: object) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return save(image or pixels(), format, exif=exif, **options)


def jpeg(image: Image.Image | None = None, orientation: int | None = None, **options: object) -> bytes:
    options = {"quality": 90, **options}
    return save(image or pixels(), "JPEG", **options) if orientation is None else turned("JPEG", orientation, image, **options)


def png_chunk(name: bytes, data: bytes = b"") -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_header(width: int, height: int, depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT")


def alpha() -> Image.Image:
    image = pixels().convert("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.arange(80, dtype=np.uint8) * 3, (48, 1))))
    return image


def animation(format: str, num_frames: int = 3) -> bytes:
    frames = [pixels(seed=i) for i in range(num_frames)]
    return save(frames[0], format, save_all=True, append_images=frames[1:], duration=50, **({"lossless": True} if format == "WEBP" else {}))


# Not a plain JPEG: Pillow decodes it in the processor. Each shown as Pillow's RGB conversion shows it.
DECODED = {
    "png": save(pixels(), "PNG"),
    "webp": save(pixels(), "WEBP", quality=80),
    "gif": save(pixels().quantize(32), "GIF"),
    "bmp": save(pixels(), "BMP"),
    "tiff": save(pixels(), "TIFF"),
    "tiff compressed": save(pixels(), "TIFF", compression="tiff_lzw"),
    "tiff rotated": save(pixels(), "TIFF", tiffinfo={0x0112: 6}),
    "png rotated": turned("PNG", 8),
    "progressive jpeg": jpeg(progressive=True),
    "cmyk jpeg": jpeg(pixels().convert("CMYK")),
    "rgb jpeg": jpeg(keep_rgb=True),
    "jpeg with a tail": jpeg() + b"tail",
    "progressive rotated": jpeg(progressive=True, orientation=5),
    "one bit": save(pixels().convert("1"), "PNG"),
    "grey png": save(pixels().convert("L"), "PNG"),
    "grey alpha": save(pixels().convert("LA"), "PNG"),
    "alpha": save(alpha(), "PNG"),
    "alpha webp": save(alpha(), "WEBP", lossless=True),
    "palette": save(pixels().quantize(16), "PNG"),
    "palette with transparency": save(pixels().quantize(16), "PNG", transparency=3),
    "16 bit": save(Image.fromarray((np.arange(48 * 80).reshape(48, 80) * 17).astype(np.uint16)), "PNG"),
    "animated gif": animation("GIF"),
    "animated webp": animation("WEBP"),
    "1x1": save(pixels(1, 1), "PNG"),
}

# Plain baseline JPEGs: they stay encoded.
PLAIN = {
    "4:4:4": jpeg(subsampling=0),
    "4:2:2": jpeg(subsampling=1),
    "4:2:0": jpeg(subsampling=2),
    "grey": jpeg(pixels().convert("L")),
    "1x1": jpeg(pixels(1, 1)),
    "optimised": jpeg(optimize=True),
    "restart markers": jpeg(restart_marker_rows=1),
    "comment": jpeg(comment=b"a comment with \xff\xda and \xff\xd9 in it"),
    "icc profile": jpeg(icc_profile=b"p" * 70_000),
}


def segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + (2 + len(payload)).to_bytes(2) + payload


def progressive_jpeg(num_scans: int) -> bytes:
    tables = segment(0xDB, bytes(1) + bytes([1]) * 64)
    tables += b"".join(segment(0xC4, bytes([kind, 1, *[0] * 15, value])) for kind, value in ((0x00, 0), (0x10, 0xE0)))
    frame = segment(0xC2, bytes([8, 480 >> 8, 480 & 255, 640 >> 8, 640 & 255, 1, 1, 0x11, 0]))
    scans = segment(0xDA, bytes([1, 1, 0, 0, 0, 0])) + segment(0xDA, bytes([1, 1, 0, 1, 63, 0])) * (num_scans - 1)
    return b"\xff\xd8" + tables + frame + scans + b"\xff\xd9"


def tiled_tiff(size: int, tile: int) -> bytes:
    tags = [(256, size), (257, size), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile)]
    data = zlib.compress(bytes(tile * tile))
    tags += [(324, 14 + 12 * (len(tags) + 2)), (325, len(data))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + data
