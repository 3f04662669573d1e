"""Ten clients that send broken videos: another client's stream goes on, and a good clip is answered afterwards."""

import base64
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.serving import chat_body, serve
from tests.e2e.test_large_images import MIN_CHUNKS, Listener
from tests.unit.server.clips import encode, frames_of
from tests.unit.server.test_bad_videos import BAD

pytestmark = pytest.mark.hostile

NUM_CLIENTS = 10


def question(data: bytes) -> dict[str, object]:
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    part = {"type": "video_url", "video_url": {"url": url}, "max_pixels": 1 << 20, "do_sample_frames": False}
    return chat_body([part], max_tokens=2)


def test_streams_of_others_go_on() -> None:
    """Red if a rejected file or its decoder holds the engine up, if one is answered by anything but its 4xx, or if a good clip is not
    answered afterwards."""
    bodies = [make() for make, _, _ in BAD.values()]
    limits = ("--max-video-file-frames", "10000", "--max-num-encoder-tokens", "400", "--video-timeout", "120")
    with serve("demo", *limits, "--processor-arena-bytes", "512M") as engine:

        def send(body: bytes) -> int:
            return httpx.post(f"{engine.url}/v1/chat/completions", json=question(body), timeout=300).status_code

        with Listener(engine) as other, ThreadPoolExecutor(NUM_CLIENTS) as pool:
            num_before = other.num_chunks
            statuses = set(pool.map(send, bodies * 3))
            num_chunks = other.num_chunks - num_before
        assert statuses == {400, 413, 422}
        assert num_chunks >= MIN_CHUNKS and other.num_unhealthy == 0
        assert send(encode(frames_of(8))) == 200
