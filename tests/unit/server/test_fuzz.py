"""The JSON path, the reader of heads and the reader of JPEG headers on mutated input. The scanner: `test_scan.py`."""

import itertools

from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from engine.plain_jpeg import has_end, has_too_many_scans, is_jpeg, parse_plain_jpeg
from server.errors import RequestError
from server.processor.pixels import read_header
from tests.unit.server.in_process import HttpServer, echo, run_virtually, settle
from tests.unit.server.pictures import PLAIN

Edit = tuple[int, int, bytes]
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 9), st.binary(max_size=6)), max_size=6)
CUTS = st.lists(st.integers(0, 10**6), max_size=6)


def mutated(data: bytes, edits: list[Edit]) -> bytes:
    """Pieces of `data` cut out and others put in."""
    for place, length, piece in edits:
        start = place % (len(data) + 1)
        data = data[:start] + piece + data[start + length :]
    return data


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


async def answers_to(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    """Of a connection with these packets."""
    wire = await HttpServer(echo).ask(*pieces)
    found = wire.answers
    wire.leave()
    await settle()
    return found


REQUESTS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: a\r\n\r\n",
    b"POST /a%20b?c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nUpgrade: h2c\r\nConnection: Upgrade\r\n\r\nhello",
    b"POST /t HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n",
    b"PUT / HTTP/1.0\r\nContent-Length: 0\r\n\r\n",
]
ANSWERS = [b"GET /health 0", b"POST /a b 5", b"POST /t 5", b"PUT / 0"]


@given(st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=3), EDITS, CUTS)
@example([2], [(48, 5, b"")], [])
def test_heads_are_read_or_refused(numbers: list[int], edits: list[Edit], cuts: list[int]) -> None:
    """Fails if answers depend on packets, or if a bad request gets anything but a 4xx. 501: RFC 9112, 6.1."""
    whole = b"".join(REQUESTS[number] for number in numbers)
    kept = numbers[: numbers.index(3) + 1] if 3 in numbers else numbers  # HTTP/1.0 ends the connection
    assert run_virtually(answers_to(cut(whole, cuts))) == [(200, ANSWERS[number]) for number in kept]
    for status, _ in run_virtually(answers_to(cut(mutated(whole, edits), cuts))):
        assert status in (200, 100, 501) or 400 <= status < 500


@given(st.sampled_from(sorted(PLAIN)), EDITS)
def test_headers_of_jpegs_are_read_or_not(name: str, edits: list[Edit]) -> None:
    """Fails if the reader returns another size than the decoder that will be given the bytes."""
    data = memoryview(mutated(PLAIN[name], edits))
    if not is_jpeg(data):
        return
    has_end(data), has_too_many_scans(data)
    plain = parse_plain_jpeg(data)
    if plain is None:
        return
    assert plain.height > 0 and plain.width > 0
    try:
        assert read_header(data)[:2] == (plain.height, plain.width)
    except RequestError as error:
        assert error.info.status == 422
    assert Image.MAX_IMAGE_PIXELS is None
