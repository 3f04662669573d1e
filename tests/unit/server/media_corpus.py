"""Files in every form, good, odd and bad, each with the statuses that a request with it may have."""

import io
import itertools
import random
import struct
import zlib
from collections.abc import Iterator

from PIL import Image

from tests.unit.server.pictures import DECODED, PLAIN, animation, jpeg, pixels, png_chunk, png_header, progressive_jpeg, save, tiled_tiff

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
GOOD, BAD = (200,), (400, 413, 422)
ANY = GOOD + BAD
Case = tuple[bytes, tuple[int, ...]]


def png_of(*chunks: tuple[bytes, bytes], depth: int = 8, colour: int = 2) -> bytes:
    return png_header(8, 8, depth, colour)[:-12] + b"".join(png_chunk(*chunk) for chunk in (*chunks, (b"IEND", b"")))


def patched(data: bytes, place: int, piece: bytes) -> bytes:
    return data[:place] + piece + data[place + len(piece) :]


def jpeg_frame(data: bytes) -> int:
    return next(data.index(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in data) + 5


def common_files() -> Iterator[tuple[str, Case]]:
    for kind in KINDS:
        data = save(pixels(), kind)
        yield f"{kind}", (data, GOOD)
        yield f"{kind} with a tail", (data + b"tail" * 100, GOOD if kind != "BMP" else ANY)
        yield f"{kind} twice", (data + data, GOOD)
        for tenth in range(1, 10):
            yield f"{kind} cut at {tenth} tenths", (data[: len(data) * tenth // 10], BAD if kind in ("JPEG", "BMP") else ANY)
        yield from ((f"{kind} less {n} bytes", (data[:-n], BAD if kind == "BMP" else ANY)) for n in (1, 2, 9))
        for seed in range(3):
            place = len(data) * (2 + 2 * seed) // 9
            yield f"{kind} with damage {seed}", (patched(data, place, bytes([255, 0, 255, 1 + seed] * 3)), ANY)
        for seed in range(10):
            draw = random.Random(seed)
            damaged = patched(patched(data, draw.randrange(300), draw.randbytes(1)), draw.randrange(300), draw.randbytes(1))
            yield f"{kind} with a damaged header {seed}", (damaged, ANY)


def odd_files() -> Iterator[tuple[str, Case]]:
    for mode in ("1", "L", "LA", "P", "RGBA", "I;16"):
        yield f"PNG of mode {mode}", (save(Image.new(mode, (40, 30)), "PNG"), GOOD)
    for mode in ("L", "CMYK"):
        yield f"JPEG of mode {mode}", (save(Image.new(mode, (40, 30)), "JPEG"), GOOD)
    yield from ((f"{kind} animated", (animation(kind), GOOD)) for kind in ("GIF", "WEBP", "PNG", "TIFF"))
    yield from ((f"plain {name}", (data, GOOD)) for name, data in PLAIN.items())
    yield from ((f"decoded {name}", (data, GOOD)) for name, data in DECODED.items())
    yield from (
        (f"orientation {value}", (jpeg(orientation=value), GOOD if value in range(10) else ANY)) for value in (0, 1, 5, 8, 9, 60_000)
    )
    for width, height in ((1, 1), (1, 200), (200, 1), (2, 2), (31, 33)):
        yield f"{width}x{height}", (save(Image.new("RGB", (width, height)), "PNG"), GOOD)


def false_claims() -> Iterator[tuple[str, Case]]:
    for width, height in ((1, 201), (20_000, 1), (0, 0), (0, 9), (30_000, 30_000), (1 << 31, 1), (0xFFFFFFFF, 0xFFFFFFFF)):
        yield f"a PNG that claims {width}x{height}", (png_header(width, height), BAD)
    plain = save(pixels(), "JPEG")
    for claim in ((0, 0), (1, 65_535), (65_535, 65_535), (4000, 4000)):
        yield (
            f"a JPEG that claims {claim}",
            (patched(plain, jpeg_frame(plain), struct.pack(">HH", *claim)), BAD if claim != (4000, 4000) else ANY),
        )


def hostile_files() -> Iterator[tuple[str, Case]]:
    pixel_data = zlib.compress(b"".join(b"\0" + bytes(24) for _ in range(8)))
    bomb = zlib.compress(bytes(60_000_000), 9)
    yield "a PNG by hand", (png_of((b"IDAT", pixel_data)), GOOD)
    yield "a PNG without pixels", (png_of(), BAD)
    yield "a PNG with too few pixels", (png_of((b"IDAT", zlib.compress(b"\0" * 25))), ANY)
    yield "a PNG with a bomb for pixels", (png_of((b"IDAT", bomb)), ANY)
    yield "a PNG with a bomb for text", (png_of((b"zTXt", b"k\0\0" + bomb), (b"IDAT", pixel_data)), ANY)
    yield "a PNG with a bomb for a profile", (png_of((b"iCCP", b"k\0\0" + bomb), (b"IDAT", pixel_data)), ANY)
    yield "a PNG of an unknown depth", (png_of((b"IDAT", pixel_data), depth=3), BAD)
    yield "a PNG of an unknown colour", (png_of((b"IDAT", pixel_data), colour=9), BAD)
    yield "a PNG without a palette", (png_of((b"IDAT", pixel_data), colour=3), ANY)
    yield "a PNG with a huge chunk", (patched(png_of((b"IDAT", pixel_data)), 33, b"\x7f\xff\xff\xff"), ANY)
    yield "a JPEG of very many scans", (progressive_jpeg(129), ANY)
    yield "a TIFF of large tiles", (tiled_tiff(64, 4096), ANY)


# Of other formats, or of ours and empty.
BEGINNINGS: dict[str, bytes] = {
    "nothing but a start": b"\xff\xd8\xff",
    "text": b"hello",
    "zeros": bytes(1000),
    "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
    "HEIC": b"\0\0\0\x18ftypheic" + bytes(16),
    "AVIF": b"\0\0\0\x18ftypavif" + bytes(16),
    "an empty GIF": b"GIF89a" + bytes(7),
    "an empty WebP": b"RIFF\4\0\0\0WEBP",
    "an empty TIFF": b"II*\0\10\0\0\0\0\0\0\0\0\0",
    "an empty BMP": b"BM" + bytes(60),
    "MP4": b"\0\0\0\x18ftypisom" + bytes(16),
}


def foreign_files() -> Iterator[tuple[str, Case]]:
    yield from ((name, (data, BAD)) for name, data in BEGINNINGS.items())
    for kind in ("DIB", "ICO", "PPM", "PCX", "TGA", "SGI", "JPEG2000", "ICNS"):
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, kind)
        yield f"a {kind}, which is none of the formats", (file.getvalue(), BAD)


CORPUS = dict(itertools.chain(common_files(), odd_files(), false_claims(), hostile_files(), foreign_files()))
