"""The body scanner, the readers of heads and of JPEG headers: whatever the bytes and their splits, nothing is lost, forged or quadratic."""

import itertools
import json
import re
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from engine.wire.jpeg import parse_plain_jpeg
from server.api.http import scan
from server.api.http.scan import Scanner
from server.errors import RequestError
from server.processor.media.decoder import read_header
from tests.unit.server.in_process import HttpServer, echo, run_virtually, settle
from tests.unit.server.pictures import PLAIN
from tests.unit.server.raw_http import Counted

NONCE = "0123456789abcdef"
PIECES = st.sampled_from(
    ['"', "\\", "/", "data:", '"data:', ";base64,", "data:image/png;base64,", "image\\/png", "AAAA", "{", ":", ",", "é", "\\u0041", "ref"]
)


def feed(body: bytes, cuts: list[int], max_references: int = 10) -> tuple[Scanner, memoryview]:
    scanner = Scanner(NONCE, max_references)
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for start, end in itertools.pairwise(edges):
        scanner.feed(body[start:end])
    return scanner, memoryview(body)


def originals(value: object, scanner: Scanner, region: memoryview) -> object:
    if isinstance(value, dict):
        return {str(originals(key, scanner, region)): originals(item, scanner, region) for key, item in value.items()}
    if isinstance(value, list):
        return [originals(item, scanner, region) for item in value]
    if isinstance(value, str) and (index := scanner.index_of(value)) is not None:
        reference = scanner.references[index]
        payload = bytes(region[reference.offset : reference.offset + reference.length])
        return json.loads(reference.opening + payload + b'"')
    return value


URIS = st.builds(
    lambda mime, data: f"data:{mime};base64,{data}",
    st.sampled_from(["image/png", "image/jpeg;charset=utf-8", "", "x" * 300]),
    st.text('ABCab+/=\n\\"é', max_size=40),
)
BARE = st.builds(lambda repeats, rest: "iVBORw0KGg+/" * repeats + rest, st.integers(15, 20), st.text('AB+/=\n\\"é', max_size=8))
SAMPLES = ["data", "data:", "data:image/png", "data:image/png;base64,", 'say "data:x;base64,y"']
TEXTS = st.one_of(st.text(max_size=20), URIS, BARE, st.sampled_from(SAMPLES))
VALUES = st.recursive(TEXTS, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXTS, inner, max_size=4)), max_leaves=12)
CUTS = st.lists(st.integers(0, 600), max_size=12)


def restored(scanner: Scanner, region: memoryview) -> bytes:
    originals = [reference.opening + region[reference.offset : reference.offset + reference.length] for reference in scanner.references]
    return re.sub(rb'"%s:(\d+)' % NONCE.encode(), lambda found: originals[int(found[1])], scanner.json())


@given(VALUES, CUTS, st.booleans(), st.booleans())
def test_any_split_of_any_json_is_the_whole_with_uris_swapped(value: object, cuts: list[int], ascii_only: bool, slashes: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    body = (text.replace("/", "\\/") if slashes else text).encode("utf-8", "surrogatepass")
    scanner, region = feed(body, cuts)
    swapped = json.loads(scanner.json())
    assert originals(swapped, scanner, region) == json.loads(body)


@given(st.lists(PIECES, max_size=40), CUTS, st.integers(0, 3))
def test_any_bytes_come_back_and_splits_do_not_matter(pieces: list[str], cuts: list[int], max_references: int) -> None:
    body = "".join(pieces).encode()
    scanner, region = feed(body, cuts, max_references)
    assert restored(scanner, region) == body
    whole, _ = feed(body, [], max_references)
    assert [(r.opening, r.offset, r.length) for r in scanner.references] == [(r.opening, r.offset, r.length) for r in whole.references]
    assert scanner.json() == whole.json()
    assert len(scanner.references) <= max_references


def test_some_references_kept_others_restored() -> None:
    scanner, region = feed(b'["data:a/b;base64,QUJD","data:c/d;base64,RUZH"]', [])
    scanner.used.add(1)
    assert scanner.restored(json.loads(scanner.json()), region) == ["data:a/b;base64,QUJD", f"{NONCE}:1"]


def test_every_cut_finds_the_same_references() -> None:
    body = rb'{"a":"data:image\/png;base64,AA\/A\\","b":"\"data:x;base64,no\"","c":["data:image/gif;base64,R0lG","data:,x"]}'
    for cut, gap in itertools.product(range(len(body)), range(3)):
        scanner, _ = feed(body, [cut, cut + gap])
        assert [(r.mime, r.offset, r.length) for r in scanner.references] == [("image/png", 29, 7), ("image/gif", 93, 4)], cut


def test_a_reference_needs_the_nonce() -> None:
    scanner, _ = feed(b'["data:a/b;base64,QUJD"]', [])
    assert scanner.index_of("0:0") is None
    assert scanner.index_of("data:a/b;base64,QUJD") is None
    assert scanner.index_of(f"{NONCE}:0") == 0


class CountedPattern:
    def __init__(self, pattern: re.Pattern[bytes]):
        self._pattern = pattern

    def match(self, data: bytes, start: int = 0, end: int = sys.maxsize) -> re.Match[bytes] | None:
        found = self._pattern.match(data, start, end)
        Counted.num_touched += (min(end, len(data)) if found is None else found.end()) - start
        return found

    def fullmatch(self, data: bytes) -> re.Match[bytes] | None:
        Counted.num_touched += len(data)
        return self._pattern.fullmatch(data)


SIZE = 400_000
LINEAR = {  # and how often a byte may be touched
    "payload": (b'{"url":"data:image/png;base64,' + b"A" * SIZE + b'"}', 3),
    "escaped payload": (b'{"url":"data:image/png;base64,' + b"AAAAAAAA\\/" * (SIZE // 10) + b'"}', 3),
    "text": (b'{"text":"' + b"x" * SIZE + b'"}', 5),
    "quoted data:": (b'{"text":"' + b'\\"data:image' * (SIZE // 12) + b'"}', 8),
    "backslashes": (b'{"text":"' + b"\\\\" * (SIZE // 2) + b'"}', 6),
    "many strings": (b'["' + b'","' * (SIZE // 3) + b'"]', 5),
    "beginnings of a reference": (b'["' + b'","data' * (SIZE // 7) + b'"]', 150),  # each may be one: up to MAX_OPENING_BYTES
    "short payloads before much text": (b"[" + b'"data:;base64,AA",' * 1152 + b'"' + b"x" * SIZE + b'"]', 5),
    "short escaped payloads before much text": (b"[" + b'"data:;base64,\\/",' * 1152 + b'"' + b"x" * SIZE + b'"]', 5),
}


def test_every_byte_is_touched_a_few_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails if a backslash, or a quoted `"data`, costs a pass over the rest of the piece."""
    for name in ("STRING_REST", "HEADER", "BARE", "UNDECIDED"):
        monkeypatch.setattr(scan, name, CountedPattern(getattr(scan, name)))
    for name, (body, most) in LINEAR.items():
        for piece_bytes in (len(body), 1 << 16, 1 << 10):
            Counted.num_touched = 0
            scanner = Scanner(NONCE, 2000)
            for start in range(0, len(body), piece_bytes):
                scanner.feed(Counted(body[start : start + piece_bytes]))
            assert Counted.num_touched <= most * len(body), (name, piece_bytes, Counted.num_touched / len(body))
            assert restored(scanner, memoryview(body)) == body


def test_bare_base64_of_the_key_data_is_swapped() -> None:
    """Only long base64 under the key `data` is swapped, as in Anthropic's dialect."""
    payload = "iVBORw0KGgo\\/" * 40
    for space in ("", " ", "\n  "):
        rest = f'"text":"\\"data\\":","rest":{{"data":"{"A" * 199}"}}'
        body = f'{{"media_type":"image/png","data"{space}:{space}"{payload}",{rest}}}'.encode()
        for cut in range(len(body)):
            scanner, region = feed(body, [cut])
            assert [bytes(region[r.offset : r.offset + r.length]) for r in scanner.references] == [payload.encode()]
            assert json.loads(scanner.json())["data"] == f"{NONCE}:0"
            assert restored(scanner, region) == body


Edit = tuple[int, int, bytes]
EDITS = st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 9), st.binary(max_size=6)), max_size=6)
PLACES = st.lists(st.integers(0, 10**6), max_size=6)


def mutated(data: bytes, edits: list[Edit]) -> bytes:
    for place, length, piece in edits:
        start = place % (len(data) + 1)
        data = data[:start] + piece + data[start + length :]
    return data


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[start:end] for start, end in itertools.pairwise(places)]


async def answers_to(pieces: list[bytes]) -> list[tuple[int, bytes]]:
    wire = await HttpServer(echo).ask(*pieces)
    found = wire.answers
    wire.leave()
    await settle()
    return found


REQUESTS = [
    b"GET /health HTTP/1.1\r\nHost: x\r\nCookie: a\r\n\r\n",
    b"POST /a%20b?c HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello",
    b"POST /t HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nTrailer: x\r\n\r\n",
    b"PUT / HTTP/1.0\r\nContent-Length: 0\r\n\r\n",
]
ANSWERS = [b"GET /health 0", b"POST /a b 5", b"POST /t 5", b"PUT / 0"]


@given(st.lists(st.integers(0, len(REQUESTS) - 1), min_size=1, max_size=3), EDITS, PLACES)
def test_heads_are_read_or_refused(numbers: list[int], edits: list[Edit], cuts: list[int]) -> None:
    whole = b"".join(REQUESTS[number] for number in numbers)
    kept = numbers[: numbers.index(3) + 1] if 3 in numbers else numbers  # HTTP/1.0 ends the connection
    assert run_virtually(answers_to(cut(whole, cuts))) == [(200, ANSWERS[number]) for number in kept]
    for status, _ in run_virtually(answers_to(cut(mutated(whole, edits), cuts))):
        assert status in (200, 100) or 400 <= status < 500


@given(st.sampled_from(sorted(PLAIN)), EDITS)
def test_headers_of_jpegs_are_read_or_not(name: str, edits: list[Edit]) -> None:
    """Fails if the reader returns another size than the decoder that will be given the bytes."""
    data = memoryview(mutated(PLAIN[name], edits))
    plain = parse_plain_jpeg(data)
    if plain is None:
        return
    assert plain.height > 0 and plain.width > 0
    try:
        assert read_header(data)[:2] == (plain.height, plain.width)
    except RequestError as error:
        assert error.info.status == 422
    assert Image.MAX_IMAGE_PIXELS is None
