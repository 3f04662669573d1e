"""Base64 as clients send it: with line breaks, URL-safe alphabet, missing padding, JSON escapes or percent-encoding."""

import re
from binascii import a2b_qp
from collections.abc import Iterator

import pybase64
from pydantic_core import from_json

from server.errors import invalid_image

LONE_PERCENT = re.compile(rb"%(?![0-9A-Fa-f]{2})")
WHITE_SPACE = b" \t\r\n\v\f"
PIECE_BYTES = 1 << 16
SPACES = bytes.maketrans(WHITE_SPACE, b" " * 6)  # "% 41" is no escape
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
        escape = max(text.rfind(b"\\", end - 8, end), text.rfind(b"%", end - 2, end))
        piece = text[start : escape if escape > start else end]
        start += len(piece)
        yield piece


def _unescape(text: bytes) -> bytes:
    """Remove JSON escapes and percent-encoding. ValueError. `json.loads` and `unquote_to_bytes` would need sixty times the memory; in
    quoted-printable "=" takes the role of the percent sign."""
    if b"\\" in text:
        text = from_json(b'"%b"' % text.translate(SPACES)).encode("ascii")
    if LONE_PERCENT.search(text):
        raise ValueError("it contains an invalid percent escape")
    return a2b_qp(text.replace(b"=", b"=3D").replace(b"%", b"=")) if b"%" in text else text


def decode_data_url(url: str) -> bytes:
    """Decode a data: URL that the body scanner did not recognise: percent-encoded or in an unusual spelling. RequestError 422."""
    header, comma, payload = url.encode("utf-8", "replace").partition(b",")
    if not comma:
        raise invalid_image("its data: URL has no payload")
    if header.lower().rstrip().endswith(b";base64"):
        return decode_base64(payload)
    try:
        data = b"".join(map(_unescape, _pieces(payload)))
    except ValueError:
        data = b""
    if not data:
        raise invalid_image("its payload is missing or malformed")
    return data
