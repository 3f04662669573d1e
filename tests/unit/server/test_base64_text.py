"""Base64 as clients really send it, compared with the obvious way to read it, which takes sixty times the memory."""

import base64
import json
import tracemalloc
from urllib.parse import unquote_to_bytes

from hypothesis import example, given
from hypothesis import strategies as st

from server.errors import RequestError
from server.processor.base64_text import decode_base64, decode_data_url


def obvious(text: bytes) -> bytes:
    """All at once. ValueError."""
    text = json.loads(b'"' + text + b'"', strict=False).encode("ascii")
    text = unquote_to_bytes(text).translate(bytes.maketrans(b"-_", b"+/"), b" \t\r\n\v\f").rstrip(b"=")
    return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)


ESCAPES = ["%2B", "%2b", "%", "%4", "%25", "%41", "\\/", "\\n", "\\u002B", "\\u0025", "\\u00", "\\\\"]
PIECES = st.sampled_from(["QUJD", "+/", "=", "==", "-_", " ", *ESCAPES])


@example(["\\u0025", " ", "2", "000"])
@example(["\\u0025", "\n", "2", "000"])
@given(st.lists(PIECES | st.text("ABab+/=%\\u0025", max_size=4), max_size=30))
def test_every_spelling(parts: list[str]) -> None:
    """Fails if an escape, a percent sign or a padding is read otherwise than in the obvious way."""
    text = "".join(parts).encode()
    try:
        expected = obvious(text) or None
    except ValueError:
        expected = None
    try:
        found = decode_base64(text)
    except RequestError:
        found = None
    assert found == expected


def test_escapes_cost_no_more_than_a_few_times_their_size() -> None:
    """Fails if a few megabytes of escaped base64 take gigabytes to read."""
    for escape in ("%2B", "\\u002b", "\\/"):
        text = (escape * (400_000 // len(escape) // 4 * 4)).encode()
        tracemalloc.start()
        data = decode_base64(text)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert len(data) == len(text) // len(escape) * 3 // 4
        assert peak < 3 * len(text), escape


def test_a_percent_encoded_data_url_costs_little_too() -> None:
    """Fails if payloads that are no base64 are the hole that is left."""
    url = "data:image/png," + "%41" * 400_000
    tracemalloc.start()
    assert decode_data_url(url) == b"A" * 400_000
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * len(url)
