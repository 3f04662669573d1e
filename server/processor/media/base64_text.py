"""Base64 as clients send it: with line breaks, URL-safe alphabet, missing padding or JSON escapes."""

from collections.abc import Iterator

import pybase64
from pydantic_core import from_json

from server.errors import invalid_image

WHITE_SPACE = b" \t\r\n\v\f"
PIECE_BYTES = 1 << 16
SPACES = bytes.maketrans(WHITE_SPACE, b" " * 6)  # `from_json` refuses line breaks
URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")


def decode_base64(text: memoryview | bytes) -> bytes:
    """Decode base64 from a JSON string, including escapes. RequestError 422."""
    try:
        data: bytes = pybase64.b64decode(text, validate=True)
    except ValueError:
        data = _decode_unusual(bytes(text))
    if not data:
        raise invalid_image("it has no payload")
    return data


def _decode_unusual(text: bytes) -> bytes:
    try:
        plain = b"".join(_unescape(piece).translate(URL_SAFE_TO_STANDARD, WHITE_SPACE) for piece in _pieces(text)).rstrip(b"=")
        data: bytes = pybase64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except ValueError:
        raise invalid_image("its base64 data is malformed") from None
    return data


def _pieces(text: bytes) -> Iterator[bytes]:
    """Yield pieces that cut no escape sequence; other threads run between them."""
    start = 0
    while start < len(text):
        end = start + PIECE_BYTES
        escape = text.rfind(b"\\", end - 8, end)
        piece = text[start : escape if escape > start else end]
        start += len(piece)
        yield piece


def _unescape(text: bytes) -> bytes:
    """Remove JSON escapes. ValueError. `json.loads` would need sixty times the memory."""
    return from_json(b'"%b"' % text.translate(SPACES)).encode("ascii") if b"\\" in text else text


def decode_data_url(url: str) -> bytes:
    """Decode a data: URL in a spelling that the body scanner does not recognise. RequestError 422."""
    header, _, payload = url.encode("utf-8", "replace").partition(b",")
    if not header.lower().rstrip().endswith(b";base64"):
        raise invalid_image("its data: URL has no base64")
    return decode_base64(payload)
