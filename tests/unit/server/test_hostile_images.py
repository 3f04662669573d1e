"""Small files that would keep a decoder busy for long, or make it allocate much."""

import base64
import time

from tests.unit.server.loading import Loading
from tests.unit.server.pictures import jpeg, progressive_jpeg, tiled_tiff


async def test_a_jpeg_of_very_many_scans_is_a_422(loading: Loading) -> None:
    """Red if a few bytes can keep a pool thread busy for minutes: each scan is a pass over all pixels. What looks like one is none."""
    for data in (progressive_jpeg(129), progressive_jpeg(3, num_comments=5000)):
        error = await loading.refusal(loading.body(base64.b64encode(data)))
        assert (error.info.status, "more scans or segments" in error.info.message) == (422, True)
    in_a_comment, behind_the_end = progressive_jpeg(3, 10, b"\xff\xda" * 500), progressive_jpeg(3) + b"\xff\xda\x00\x02" * 500 + b"\xff\xd9"
    for data in (progressive_jpeg(100), in_a_comment, behind_the_end):
        assert (await loading.load_bytes(data)).source.width == 640


async def test_fill_bytes_take_no_time(loading: Loading) -> None:
    """Red if the header is walked byte by byte in Python."""
    data = jpeg()
    start = time.process_time()
    assert (await loading.load_bytes(data[:2] + b"\xff" * 4_000_000 + data[2:])).source.encoding == "jpeg"
    assert time.process_time() - start < 0.3


async def test_tiles_much_larger_than_the_image_are_a_422(loading: Loading) -> None:
    """Red if a small TIFF makes the decoder allocate a tile of any size."""
    assert (await loading.load_bytes(tiled_tiff(64, 256))).source.width == 64
    error = await loading.refusal(loading.body(base64.b64encode(tiled_tiff(64, 4096))))
    assert (error.info.status, "tiles" in error.info.message) == (422, True)
