"""Base64 as clients really send it: line breaks, URL-safe alphabet, missing padding, JSON escapes. Called by `image.py` in pools."""

import json
from collections.abc import Iterable, Iterator
from urllib.parse import unquote_to_bytes

import pybase64

from server.errors import RequestError

WHITE_SPACE = b" \t\r\n\v\f"
PIECE_BYTES = 1 << 16
ESCAPE_BYTES = 6  # of the longest escape in a JSON string
URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")


def decode_base64(text: memoryview | bytes) -> bytes:
    """The bytes of base64 that stood in a JSON string, escapes included. RequestError 400."""
    data = decode_usual_base64(text)
    if data is None:
        data = _decode_unusual(bytes(text))
    if not data:
        raise RequestError(400, "it has no payload", code="invalid_image")
    return data


def decode_usual_base64(text: memoryview | bytes) -> bytes | None:
    """None if it is not as the standard has it; in a millisecond for four megabytes."""
    try:
        data: bytes = pybase64.b64decode(text, validate=True)
    except ValueError:
        return None
    return data


def _decode_unusual(text: bytes) -> bytes:
    """Piece by piece: what unescaping makes of each character is many times larger than it."""
    decoded, rest, is_ended = bytearray(), b"", False
    try:
        for piece in unquote(_unescape(text)):
            data, padding, behind = piece.translate(URL_SAFE_TO_STANDARD, WHITE_SPACE).partition(b"=")
            if (is_ended and data) or behind.strip(b"="):
                raise ValueError("there is something behind the padding")
            is_ended |= bool(padding)
            rest += data
            end = len(rest) // 4 * 4
            decoded += pybase64.b64decode(rest[:end], validate=True)
            rest = rest[end:]
        decoded += pybase64.b64decode(rest + b"=" * (-len(rest) % 4), validate=True)
    except ValueError:
        raise RequestError(400, "its base64 text is damaged", code="invalid_image") from None
    return bytes(decoded)


def _unescape(text: bytes) -> Iterator[bytes]:
    """The inside of a JSON string that holds ASCII only, in pieces. ValueError for any other."""
    start = 0
    while start < len(text):
        end = start + PIECE_BYTES
        backslash = text.rfind(b"\\", end - ESCAPE_BYTES + 1, end)
        piece = text[start : backslash if start < backslash else end]
        start += len(piece)
        yield json.loads(b'"' + piece + b'"', strict=False).encode("ascii") if b"\\" in piece else piece


def unquote(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """What percent signs stand for, as `unquote_to_bytes` has it."""
    rest = b""
    for piece in pieces:
        piece = rest + piece
        percent = piece.rfind(b"%", max(0, len(piece) - 2))
        piece, rest = (piece, b"") if percent < 0 else (piece[:percent], piece[percent:])
        yield unquote_to_bytes(piece)
    yield unquote_to_bytes(rest)


def decode_data_url(url: str) -> bytes:
    """The bytes of a data: URL that the body scanner did not take: percent-encoded or oddly spelt. RequestError 400."""
    header, comma, payload = url.partition(",")
    if not comma:
        raise RequestError(400, "its data: URL has no payload", code="invalid_image")
    raw = payload.encode("utf-8", "replace")
    if header.lower().rstrip().endswith(";base64"):
        return decode_base64(raw)
    data = b"".join(unquote(raw[start : start + PIECE_BYTES] for start in range(0, len(raw), PIECE_BYTES)))
    if not data:
        raise RequestError(400, "it has no payload", code="invalid_image")
    return data
