"""The body scanner: whatever the bytes and however they are split, nothing is lost, nothing is forged, nothing is quadratic."""

import itertools
import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.http.scan import Scanner

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
    """A parsed JSON value with every reference replaced by the string that it stands for."""
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


@settings(max_examples=300, deadline=None)
@given(VALUES, CUTS, st.booleans(), st.booleans())
def test_any_split_of_any_json_is_the_whole_with_uris_swapped(value: object, cuts: list[int], ascii_only: bool, slashes: bool) -> None:
    """Red if a split, an escape or a key makes the scanner swap, cut or lose a string."""
    text = json.dumps(value, ensure_ascii=ascii_only)
    body = (text.replace("/", "\\/") if slashes else text).encode("utf-8", "surrogatepass")
    scanner, region = feed(body, cuts)
    swapped = json.loads(scanner.json(region))
    assert originals(swapped, scanner, region) == json.loads(body)


@settings(max_examples=500, deadline=None)
@given(st.lists(PIECES, max_size=40), CUTS, st.integers(0, 3))
def test_any_bytes_come_back_and_splits_do_not_matter(pieces: list[str], cuts: list[int], max_references: int) -> None:
    """Red if restoring every reference does not give the body back byte for byte, or if the result depends on how the body arrived."""
    body = "".join(pieces).encode()
    scanner, region = feed(body, cuts, max_references)
    assert scanner.json(region, keep=()) == body
    whole, _ = feed(body, [], max_references)
    assert [(r.opening, r.offset, r.length) for r in scanner.references] == [(r.opening, r.offset, r.length) for r in whole.references]
    assert scanner.json(region) == whole.json(region)
    assert len(scanner.references) <= max_references


def test_every_single_cut_finds_the_same_references() -> None:
    """Red if the state between two chunks forgets half an opening, an escape or a closing quote."""
    body = (
        rb'{"a":"data:image\/png;base64,AA\/A\\","b":"\"data:x;base64,no\"","c":["data:image/gif;base64,R0lG","data:,x","data:;base64,"]}'
    )
    expected, expected_region = feed(body, [])
    assert [(r.mime, r.length) for r in expected.references] == [("image/png", 7), ("image/gif", 4), ("", 0)]
    for cut in range(len(body)):
        for second in (cut, cut + 1, cut + 2):
            scanner, region = feed(body, [cut, second])
            assert scanner.json(region) == expected.json(expected_region)
            assert [(r.offset, r.length) for r in scanner.references] == [(r.offset, r.length) for r in expected.references]


def test_references_say_where_the_payloads_are() -> None:
    """Red if offsets and lengths stop describing where the payload bytes are."""
    scanner, region = feed(b'["data:image/png;base64,QUJD","data:image/webp;base64,REVGRw=="]', [13, 30])
    found = [(r.mime, bytes(region[r.offset : r.offset + r.length])) for r in scanner.references]
    assert found == [("image/png", b"QUJD"), ("image/webp", b"REVGRw==")]


def test_some_references_kept_others_restored() -> None:
    """Red if turning one reference back into text moves or renumbers another."""
    scanner, region = feed(b'["data:a/b;base64,QUJD","data:c/d;base64,RUZH"]', [])
    assert json.loads(scanner.json(region, keep={1})) == ["data:a/b;base64,QUJD", f"{NONCE}:1"]


def test_a_reference_needs_the_nonce() -> None:
    """Red if a client could write a reference without knowing the nonce."""
    scanner, _ = feed(b'["data:a/b;base64,QUJD"]', [])
    assert scanner.index_of("0:0") is None
    assert scanner.index_of("data:a/b;base64,QUJD") is None
    assert scanner.index_of(f"{NONCE}:0") == 0


@pytest.mark.parametrize(
    "body",
    [
        b'{"url":"data:image/png;base64,' + b"A" * 8_000_000 + b'"}',
        b'{"url":"data:image/png;base64,' + b"AAAAAAAA\\/" * 800_000 + b'"}',
        b'{"text":"' + b"x" * 8_000_000 + b'"}',
        b'{"text":"' + b'\\"data:image' * 700_000 + b'"}',
        b'{"text":"' + b"\\\\" * 4_000_000 + b'"}',
        b'["' + b'","' * 2_700_000 + b'"]',
    ],
    ids=["payload", "escaped payload", "text", "quoted data:", "backslashes", "many strings"],
)
def test_eight_megabytes_take_a_moment(body: bytes) -> None:
    """Red if the scanner becomes quadratic or handles bytes one by one: this takes milliseconds, except for the hostile quotes (0.5 s)."""
    start = time.thread_time()
    scanner, region = feed(body, list(range(0, len(body), 1 << 16)))
    elapsed = time.thread_time() - start
    assert scanner.json(region, keep=()) == body
    assert elapsed < 3


def test_many_short_payloads_before_much_text(no_collections: None) -> None:
    """Red if each payload with a backslash costs a pass over the rest of the piece: the event loop stood still for a second."""
    body = b"[" + b'"data:;base64,\\/",' * 1152 + b'"' + b"x" * 500_000 + b'"]'
    start = time.thread_time()
    scanner, region = feed(body, [], max_references=2000)
    elapsed = time.thread_time() - start
    assert scanner.json(region, keep=()) == body and len(scanner.references) == 1152
    assert elapsed < 0.3  # usually 0.02


@pytest.mark.parametrize("space", ["", " ", "\n  "])
def test_bare_base64_behind_the_key_data_is_swapped(space: str) -> None:
    """Red if images of Anthropic's dialect become Python strings, wherever the body is cut, or if a text or a short value is taken."""
    payload = "iVBORw0KGgo\\/" * 40
    body = f'{{"media_type":"image/png","data"{space}:{space}"{payload}","text":"\\"data\\":","rest":{{"data":"{"A" * 199}"}}}}'.encode()
    for cut in range(len(body)):
        scanner, region = feed(body, [cut])
        assert [bytes(region[r.offset : r.offset + r.length]) for r in scanner.references] == [payload.encode()]
        assert json.loads(scanner.json(region))["data"] == f"{NONCE}:0"
        assert scanner.json(region, keep=()) == body
