"""Base64 as clients really send it: line breaks, URL-safe alphabet, missing padding, JSON escapes. Called by `image.py` in pools."""

import json
from urllib.parse import unquote_to_bytes

import pybase64

from server.errors import RequestError

WHITE_SPACE = b" \t\r\n\v\f"
URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")


def decode_base64(text: memoryview | bytes) -> bytes:
    """The bytes of base64 that stood in a JSON string, escapes included. RequestError 400."""
    try:
        data: bytes = pybase64.b64decode(text, validate=True)
    except ValueError:
        data = _decode_unusual(bytes(text))
    if not data:
        raise RequestError(400, "it has no payload", code="invalid_image")
    return data


def _decode_unusual(text: bytes) -> bytes:
    try:
        if b"\\" in text:
            text = json.loads(b'"' + text + b'"', strict=False).encode("ascii")
        if b"%" in text:
            text = unquote_to_bytes(text)
        text = text.translate(URL_SAFE_TO_STANDARD, WHITE_SPACE).rstrip(b"=")
        data: bytes = pybase64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except ValueError:
        raise RequestError(400, "its base64 text is damaged", code="invalid_image") from None
    return data


def decode_data_url(url: str) -> bytes:
    """The bytes of a data: URL that the body scanner did not take: percent-encoded or oddly spelt. RequestError 400."""
    header, comma, payload = url.partition(",")
    if not comma:
        raise RequestError(400, "its data: URL has no payload", code="invalid_image")
    raw = payload.encode("utf-8", "replace")
    if header.lower().rstrip().endswith(";base64"):
        return decode_base64(raw)
    data = unquote_to_bytes(raw)
    if not data:
        raise RequestError(400, "it has no payload", code="invalid_image")
    return data
