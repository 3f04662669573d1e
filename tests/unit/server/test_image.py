"""Images on their way in, base64 included: bad input is a clean 4xx, every odd but valid form is shown as Pillow shows it."""

import asyncio
import base64
import io
import itertools
import json
import threading
import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from engine.wire.arena import ArenaFull, ArenaTooSmall
from engine.wire.config import EngineConfig
from engine.wire.jpeg import MAX_SEGMENTS, parse_plain_jpeg
from engine.wire.messages import MediaRef
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media import sources
from server.processor.media.sources import decode_base64
from tests.unit.server.loading import SIZE, Loading
from tests.unit.server.media_corpus import BAD, CORPUS, patched
from tests.unit.server.pictures import DECODED, PLAIN, jpeg, pixels, png_header, save

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of the damage that these tests are about


def shown(data: bytes) -> np.ndarray:
    return np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))


async def test_unusual_files_are_shown_as_by_pillow(loading: Loading) -> None:
    for name, data in DECODED.items():
        expected = shown(data)
        image = await loading.load_bytes(data)
        assert (image.source.encoding, image.source.orientation) == ("file", 1), name
        assert (image.source.height, image.source.width) == expected.shape[:2], name
        assert loading.bytes_of(image) == expected.tobytes(), name
        await loading.release()


@pytest.mark.hostile
@pytest.mark.gate
async def test_every_file_has_its_status(loading: Loading) -> None:
    assert sum(statuses == BAD for _, statuses in CORPUS.values()) > 50
    wrong = {}
    for name, (data, statuses) in CORPUS.items():
        status = 200
        try:
            await loading.load_bytes(data)
        except RequestError as error:
            status = error.info.status
            assert "/" not in error.info.message.replace("http(s)", ""), name
        except (ArenaFull, ArenaTooSmall):
            status = 413
        if status not in statuses:
            wrong[name] = status
        await loading.release()
    assert not wrong


async def test_claims_are_refused_with_the_reason(loading: Loading) -> None:
    thin = [save(Image.new("RGB", size), kind) for size, kind in itertools.product([(1, 201), (20_000, 1)], ["PNG", "JPEG"])]
    for data, words in ((png_header(30_000, 30_000), "pixels"), *((data, "aspect ratio") for data in thin)):
        error = await loading.refusal(loading.body(base64.b64encode(data)))
        assert error.info.status == 400 and words in error.info.message
    with pytest.raises(ArenaTooSmall):
        await loading.load_bytes(png_header(10_000, 10_000))


async def test_pixels_take_the_place_of_the_file(loading: Loading) -> None:
    image = await loading.load_bytes(DECODED["png"])
    with pytest.raises(KeyError):
        loading.allocator.inputs.free(image.source.region.offset)
    assert image.file.encoded is None


async def test_low_detail_never_makes_an_image_larger(loading: Loading) -> None:
    payload = loading.body(base64.b64encode(jpeg(pixels(900, 900)))).payload
    for bounds in ({}, {"max_pixels": 1 << 30}, {"min_pixels": 1 << 19}, {"max_pixels": 1 << 12}):
        usual = await loading.load(MediaRef(payload, **bounds))
        low = await loading.load(MediaRef(payload, cap=512 * 512, **bounds))
        assert low.num_tokens == min(usual.num_tokens, loading.images.geometry.num_tokens((1, 32, 32))), bounds


@pytest.mark.parametrize("is_idle", [True, False])
async def test_the_first_image_of_an_idle_engine_waits_for_no_thread(loading: Loading, is_idle: bool) -> None:
    data = PLAIN["4:2:0"]
    held = threading.Event()
    for _ in range(EngineConfig().media_pool_size):
        loading.sources.pool.submit(held.wait)
    loading.images.early.arm(is_idle)
    image = loading.new_image(loading.body(base64.b64encode(data)))
    image.start()
    assert len(loading.announced) == is_idle
    held.set()
    await image.load()
    assert (image.source.ticket, loading.bytes_of(image), len(loading.announced)) == (int(is_idle), data, int(is_idle))
    await image.release()


async def test_plain_jpegs_stay_encoded_and_sizes_are_upright(loading: Loading) -> None:
    corners = np.asarray(pixels())[::47, ::79].reshape(4, 3)
    assert len(np.unique(corners, axis=0)) == 4, "a wrong rotation of the picture would not show"
    plain = [(1, data) for data in PLAIN.values()]
    for orientation, data in [*plain, *((number, jpeg(orientation=number)) for number in range(10))]:
        image = await loading.load_bytes(data)
        assert image.source.encoding == "jpeg" and loading.bytes_of(image) == data
        assert image.source.orientation == (orientation if 1 <= orientation <= 8 else 1)
        assert (image.source.height, image.source.width) == shown(data).shape[:2], orientation


async def test_orientation_in_xmp_and_damaged_metadata(loading: Loading) -> None:
    data = jpeg(xmp=b'<x tiff:Orientation="6"/>')
    assert (await loading.load_bytes(data)).source.orientation == 6
    assert shown(data).shape[:2] == (80, 48)
    for exif in (b"Exif\0\0", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff", b"Exif\0\0MM\0*\0\0\0\x08\xff\xff" + b"\xff" * 30):
        image = await loading.load_bytes(jpeg(exif=exif))
        assert (image.source.encoding, image.source.orientation) == ("jpeg", 1)


async def test_limits_on_pixels_after_resizing(checkpoint: Checkpoint) -> None:
    square = save(Image.new("RGB", (320, 320)), "PNG")  # 100 tokens
    for settings, num_tokens in (({"max_pixels": 50 * 32 * 32}, 49), ({"min_pixels": 400 * 32 * 32}, 400)):
        made = Loading(checkpoint, **settings)
        body = made.body(base64.b64encode(square))
        assert (await made.load(body)).num_tokens == num_tokens
        assert (await made.load(MediaRef(body.payload, min_pixels=1024, max_pixels=320 * 320))).num_tokens == 100
        await made.close()


async def test_bad_data_is_a_4xx_also_in_a_hurry(loading: Loading) -> None:
    urls = "data:", "data:,", "data:image/png;base64", "data:image/png;base64,", "data:image/png;base64,???", "DATA:image/png,%89PNG"
    texts = b"", b"====", b"*not base64*", b"QUJ", b"A", b"\\", b"\\u00", b"QUJD\xff", b"=QUJD"
    files = PLAIN["4:2:0"][:-20], PLAIN["4:2:0"][:40], DECODED["png"][:60]
    for ref in itertools.chain((MediaRef(url=url) for url in urls), map(loading.body, (*texts, *map(base64.b64encode, files)))):
        calm = await loading.refusal(ref)
        loading.images.early.arm(is_idle=True)
        hurried = await loading.refusal(ref)
        assert calm.info == hurried.info and calm.info.status in (400, 422) and not loading.announced, ref


async def test_data_urls_that_the_scanner_leaves_alone(loading: Loading) -> None:
    data = DECODED["1x1"]
    odd = "DATA:image/png;BASE64," + base64.b64encode(data).decode()
    assert loading.bytes_of(await loading.load(MediaRef(url=odd))) == shown(data).tobytes()


async def test_identity_covers_bytes_and_limits(loading: Loading) -> None:
    first = await loading.load_bytes(PLAIN["4:2:0"])
    again = await loading.load_bytes(PLAIN["4:2:0"])
    other = await loading.load_bytes(PLAIN["4:4:4"])
    body = loading.body(base64.b64encode(PLAIN["4:2:0"]))
    smaller = await loading.load(MediaRef(body.payload, max_pixels=first.num_tokens * 32 * 32 // 2))
    assert first.hash == again.hash and len({first.hash, other.hash, smaller.hash}) == 3
    assert len(first.hash) == 32 and smaller.num_tokens < first.num_tokens
    error = await loading.refusal(MediaRef(body.payload, min_pixels=5000, max_pixels=4999))
    assert error.info.status == 400 and "max_pixels" in error.info.message


class SlowDecoding:
    """Threads that decode base64 stand still until they may go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.has_begun, self.may_go_on = threading.Event(), threading.Event()
        self._decode = sources.decode_base64
        monkeypatch.setattr(sources, "decode_base64", self)

    def __call__(self, text: memoryview | bytes) -> bytes:
        self.has_begun.set()
        self.may_go_on.wait(60)
        return self._decode(text)


async def test_a_release_waits_for_its_thread(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if a region can be given back while a pool thread still writes to it, also after its load was cancelled."""
    slow = SlowDecoding(monkeypatch)
    image = loading.new_image(loading.body(base64.b64encode(PLAIN["4:2:0"])))

    async def start_and_leave() -> None:
        image.start()
        slow.has_begun.wait(60)
        load = asyncio.create_task(image.load())
        await asyncio.sleep(0)
        load.cancel()
        await image.release()

    leaving = asyncio.create_task(start_and_leave())
    for _ in range(20):
        await asyncio.sleep(0)
    assert not leaving.done() and not loading.allocator.is_empty()
    slow.may_go_on.set()
    await leaving


async def test_what_a_download_did_not_fill_is_given_back(loading: Loading, monkeypatch: pytest.MonkeyPatch) -> None:

    async def download(url: str, append: Callable[[bytes], None], max_bytes: object) -> None:
        append(PLAIN["4:2:0"])

    monkeypatch.setattr(loading.sources.fetcher, "download", download)
    image = await loading.load(MediaRef(url="https://x.org/a.jpg"))
    assert loading.bytes_of(image) == PLAIN["4:2:0"]
    loading.allocator.inputs.free(loading.allocator.inputs.alloc(SIZE // 2 - len(PLAIN["4:2:0"]) - 64))


def test_headers_that_are_not_plain() -> None:
    data = PLAIN["4:2:0"]
    frame, scan = data.index(b"\xff\xc0"), data.index(b"\xff\xda")
    for position, piece in (
        (frame + 4, b"\x0c"),  # sample precision
        (frame + 9, b"\x04"),  # number of components
        (frame + 5, b"\0\0"),  # a height of 0
        (frame + 11, b"\x41"), (frame + 14, b"\x22"),  # luminance and chrominance sampling
        (frame + 12, b"\x03"),  # an undefined quantization table
        (frame + 1, b"\xc1"), (frame + 1, b"\xc9"), (frame + 1, b"\xc3"),  # extended, arithmetic, lossless
        (scan + 4, b"\x01"),  # one component in the scan
        (scan + 6, b"\x33"),  # undefined Huffman tables
        (len(data) - 1, b"\xd8"),  # no end
        (2, b"\xff\xfe\x00\x02" * MAX_SEGMENTS + data[2:]),  # comments that the event loop would have to walk
    ):  # fmt: skip
        assert parse_plain_jpeg(memoryview(patched(data, position, piece))) is None, (position - frame, piece[:9])
    assert parse_plain_jpeg(memoryview(data)) is not None


async def test_the_colour_transform_of_adobe(loading: Loading) -> None:
    """Decoders may or may not believe a marker that says that a JPEG is not YCbCr."""
    for transform, encoding in ((1, "jpeg"), (0, "file"), (2, "file")):
        marker = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00" + bytes([transform])
        data = PLAIN["4:2:0"][:2] + marker + PLAIN["4:2:0"][2:]
        image = await loading.load_bytes(data)
        assert image.source.encoding == encoding
        if encoding == "file":
            assert loading.bytes_of(image) == shown(data).tobytes()


def obvious(text: bytes) -> bytes:
    """All at once. ValueError."""
    text = json.loads(b'"' + text + b'"', strict=False).encode("ascii")
    text = text.translate(bytes.maketrans(b"-_", b"+/"), b" \t\r\n\v\f").rstrip(b"=")
    return base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)


ESCAPES = ["%2B", "\\/", "\\n", "\\u002B", "\\u0025", "\\u00", "\\\\"]
PIECES = st.sampled_from(["QUJD", "+/", "=", "==", "-_", " ", *ESCAPES])


@given(st.lists(PIECES | st.text("ABab+/=%\\u002B", max_size=4), max_size=30))
def test_every_spelling(parts: list[str]) -> None:
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
    for escape in ("\\u002b", "\\/"):
        text = (escape * (400_000 // len(escape) // 4 * 4)).encode()
        tracemalloc.start()
        assert len(decode_base64(text)) >= len(text) // 8
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 4 * len(text)
