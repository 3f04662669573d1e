"""Media in every form, good, odd and bad: each has its status, nothing is a bug of ours, and a good request is answered after each."""

import io
import json
import struct
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from PIL import Image

from tests.unit.server.pictures import DECODED, PLAIN, jpeg, pixels, png_header, progressive_jpeg, save, tiled_tiff
from tests.unit.server.stack import Stack, answer_text
from tests.unit.server.test_stack import image, uri

KINDS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
GOOD, BAD = (200,), (400, 413, 422)
ANY = GOOD + BAD
Case = tuple[bytes, tuple[int, ...]]


def animation(kind: str) -> bytes:
    frames = [pixels(seed=i) for i in range(3)]
    return save(frames[0], kind, save_all=True, append_images=frames[1:])


def png_chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png_of(*chunks: tuple[bytes, bytes], size: tuple[int, int] = (8, 8), depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", *size, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*chunk) for chunk in ((b"IHDR", header), *chunks, (b"IEND", b"")))


def patched(data: bytes, place: int, piece: bytes) -> bytes:
    return data[:place] + piece + data[place + len(piece) :]


def jpeg_frame(data: bytes) -> int:
    """Where height and width of a JPEG stand."""
    return next(data.index(marker) for marker in (b"\xff\xc0", b"\xff\xc2") if marker in data) + 5


def corpus() -> Iterator[tuple[str, Case]]:
    whole = {kind: save(pixels(), kind) for kind in KINDS}
    plain = whole["JPEG"]
    for kind, data in whole.items():
        yield f"{kind}", (data, GOOD)
        yield f"{kind} with a tail", (data + b"tail" * 100, GOOD if kind != "BMP" else ANY)
        yield f"{kind} twice", (data + data, GOOD)
        for tenth in range(1, 10):
            yield f"{kind} cut at {tenth} tenths", (data[: len(data) * tenth // 10], BAD if kind in ("JPEG", "BMP") else ANY)
        for seed in range(3):
            place = len(data) * (2 + 2 * seed) // 9
            yield f"{kind} with damage {seed}", (patched(data, place, bytes([255, 0, 255, 1 + seed] * 3)), ANY)
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
    for width, height in ((1, 201), (20_000, 1), (0, 0), (0, 9), (30_000, 30_000), (1 << 31, 1), (0xFFFFFFFF, 0xFFFFFFFF)):
        yield f"a PNG that claims {width}x{height}", (png_header(width, height), BAD)
    for claim in ((0, 0), (1, 65_535), (65_535, 65_535), (4000, 4000)):
        yield (
            f"a JPEG that claims {claim}",
            (patched(plain, jpeg_frame(plain), struct.pack(">HH", *claim)), BAD if claim != (4000, 4000) else ANY),
        )
    pixel_data = zlib.compress(b"".join(b"\0" + bytes(24) for _ in range(8)))
    yield "a PNG by hand", (png_of((b"IDAT", pixel_data)), GOOD)
    yield "a PNG without pixels", (png_of(), BAD)
    yield "a PNG with too few pixels", (png_of((b"IDAT", zlib.compress(b"\0" * 25))), ANY)
    yield "a PNG with a bomb for pixels", (png_of((b"IDAT", zlib.compress(bytes(60_000_000), 9))), ANY)
    yield "a PNG with a bomb for text", (png_of((b"zTXt", b"k\0\0" + zlib.compress(bytes(60_000_000), 9)), (b"IDAT", pixel_data)), ANY)
    yield "a PNG with a bomb for a profile", (png_of((b"iCCP", b"k\0\0" + zlib.compress(bytes(60_000_000), 9)), (b"IDAT", pixel_data)), ANY)
    yield "a PNG of an unknown depth", (png_of((b"IDAT", pixel_data), depth=3), BAD)
    yield "a PNG of an unknown colour", (png_of((b"IDAT", pixel_data), colour=9), BAD)
    yield "a PNG without a palette", (png_of((b"IDAT", pixel_data), colour=3), ANY)
    yield "a PNG with a huge chunk", (patched(png_of((b"IDAT", pixel_data)), 33, b"\x7f\xff\xff\xff"), ANY)
    yield "a JPEG of very many scans", (progressive_jpeg(129), BAD)
    yield "a TIFF of large tiles", (tiled_tiff(64, 4096), BAD)
    others: dict[str, bytes] = {
        "nothing but a start": b"\xff\xd8\xff",
        "text": b"hello",
        "HTML": b"<html></html>",
        "zeros": bytes(1000),
        "SVG": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        "EPS": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n",
        "PDF": b"%PDF-1.7\n",
        "HEIC": b"\0\0\0\x18ftypheic" + bytes(16),
        "AVIF": b"\0\0\0\x18ftypavif" + bytes(16),
        "ICO": b"\0\0\1\0\1\0" + bytes(30),
        "PSD": b"8BPS\0\1" + bytes(30),
        "PPM": b"P6 2 2 255 " + bytes(12),
        "a ZIP": b"PK\3\4" + bytes(30),
        "an empty GIF": b"GIF89a" + bytes(7),
        "an empty WebP": b"RIFF\4\0\0\0WEBP",
        "an empty TIFF": b"II*\0\10\0\0\0\0\0\0\0\0\0",
        "an empty BMP": b"BM" + bytes(60),
        "MP4": b"\0\0\0\x18ftypisom" + bytes(16),
    }
    yield from ((name, (data, BAD)) for name, data in others.items())
    for kind in ("DIB", "ICO", "PPM", "PCX", "TGA", "SGI", "JPEG2000", "ICNS"):
        file = io.BytesIO()
        Image.new("RGB", (64, 64)).save(file, kind)
        yield f"a {kind}, which is none of the formats", (file.getvalue(), BAD)


CORPUS = dict(corpus())
URLS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "an empty URL": ("", BAD),
    "no scheme": ("x.png", BAD),
    "javascript": ("javascript:alert(1)", BAD),
    "no payload": ("data:image/png;base64,", BAD),
    "no comma": ("data:image/png;base64", BAD),
    "half a character": ("data:image/png;base64,A", BAD),
    "a number": (5, BAD),
    "null": (None, BAD),
    "a list": (["data:"], BAD),
    "many redirections of a scheme": ("data:data:data:,x", BAD),
    "FTP": ("ftp://x.org/x.png", BAD),
    "a socket": ("http://[::1]/x.png", BAD),
    "credentials": ("http://a:b@x.org/", BAD),
    "a port that is none": ("http://x.org:99999/", BAD),
    "percent": ("data:image/png,%ff%d8%ff", BAD),
}


def check(stack: Stack, content: object, statuses: tuple[int, ...]) -> None:
    started = time.monotonic()
    response = stack.http.post("/v1/chat/completions", content=json.dumps({"messages": [{"role": "user", "content": content}]}).encode())
    assert response.status_code in statuses, response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    assert time.monotonic() - started < 5
    assert stack.chat("still there?").json()["choices"][0]["message"]["content"]


@pytest.fixture(autouse=True, scope="module")
def clean(stack: Stack) -> Iterator[None]:
    """At the end both arenas are empty."""
    stack.scheduler.script = answer_text
    yield
    stack.recover()


@pytest.mark.parametrize("name", CORPUS)
def test_every_file_has_its_status(stack: Stack, name: str) -> None:
    """Red if a file of any form is a 5xx, a wait, or the end of a process; or one that is good is refused, or the other way round."""
    data, statuses = CORPUS[name]
    check(stack, [image(uri(data))], statuses)


@pytest.mark.parametrize("name", URLS)
def test_every_url_has_its_status(stack: Stack, name: str) -> None:
    """The same of what is no file."""
    url, statuses = URLS[name]
    check(stack, [image(url)], statuses)


def test_the_corpus_is_large_enough() -> None:
    """Red if the cases get lost: a test of nothing is always green."""
    assert len(CORPUS) > 150 and sum(statuses == BAD for _, statuses in CORPUS.values()) > 50
