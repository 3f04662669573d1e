"""Small files that claim to be gigabytes of pixels, and broken videos: other streams go on, memory is bounded, `/health` stays 200."""

import base64
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from PIL import Image

from tests.e2e.serving import Engine, chat_body, children_of, data_uri, role_of, serve, text_part
from tests.eventually import HANG_GUARD_S, eventually
from tests.unit.server.clips import encode, frames_of
from tests.unit.server.test_bad_videos import BAD

pytestmark = pytest.mark.hostile

MIB = 1 << 20
MIN_CHUNKS = 20  # of another stream while an image is decoded


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with serve("demo", "--max-model-len", "8192") as running:
        yield running


HOSTILE: dict[str, Callable[[], list[str]]] = {
    "a 1-bit PNG of 13000 x 13000": lambda: [data_uri(Image.new("1", (13_000, 13_000)), "PNG")],
    "a JPEG of 13000 x 13000": lambda: [data_uri(Image.new("L", (13_000, 13_000)), "JPEG")],
    "twelve JPEGs of 4000 x 4000": lambda: [data_uri(Image.new("L", (4000, 4000), i), "JPEG") for i in range(12)],
    "a GIF of 13000 x 13000": lambda: [data_uri(Image.new("P", (13_000, 13_000)), "GIF")],
}


class Listener:
    """Another client's stream: its number of chunks, and of bad answers of `/health`."""

    def __init__(self, engine: Engine):
        self.num_unhealthy = 0
        self.num_chunks = 0
        self._engine = engine
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._listen), threading.Thread(target=self._ask_for_health)]

    def __enter__(self) -> "Listener":
        for thread in self._threads:
            thread.start()
        eventually(lambda: self.num_chunks, "the first chunk")
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _listen(self) -> None:
        while not self._stopping.is_set():
            body = chat_body("Hello", max_tokens=4000, ignore_eos=True, stream=True)
            with httpx.stream("POST", f"{self._engine.url}/v1/chat/completions", json=body, timeout=120) as response:
                for line in response.iter_lines():
                    self.num_chunks += '"content":"' in line
                    if self._stopping.is_set():
                        return

    def _ask_for_health(self) -> None:
        while not self._stopping.wait(0.2):
            self.num_unhealthy += httpx.get(f"{self._engine.url}/health", timeout=HANG_GUARD_S).status_code != 200


def memory_of(engine: Engine, key: str) -> int:
    return sum(int(Path(f"/proc/{pid}/status").read_text().partition(f"{key}:")[2].split()[0]) * 1024 for pid in engine.children)


@pytest.mark.parametrize("name", HOSTILE)
def test_streams_of_others_go_on(engine: Engine, name: str) -> None:
    parts = [{"type": "image_url", "image_url": {"url": uri}} for uri in HOSTILE[name]()]
    before = memory_of(engine, "RssAnon")
    with Listener(engine) as other:
        num_before = other.num_chunks
        response = engine.chat([*parts, text_part("What is it?")])
        num_chunks = other.num_chunks - num_before
    assert response.status_code == 200, response.text
    assert num_chunks >= MIN_CHUNKS, "the stream stood still between the request and its answer"
    assert other.num_unhealthy == 0
    assert memory_of(engine, "RssAnon") - before < 300 * MIB


def test_more_pixels_than_a_request_may_have(engine: Engine) -> None:
    """Pixels are added up before one image is decoded."""
    part = {"type": "image_url", "image_url": {"url": data_uri(Image.new("1", (13_000, 13_000)), "PNG")}}
    response = engine.chat([part] * 7)
    assert response.status_code == 413 and "pixels" in response.json()["error"]["message"]
    assert engine.text("Still well?")
    assert [role_of(pid) for pid in children_of(engine.process.pid)] == [role_of(pid) for pid in engine.children]


def test_streams_go_on_beside_ten_clients_with_broken_videos() -> None:
    """A good clip is answered afterwards."""
    limits = ("--max-video-file-frames", "10000", "--max-num-encoder-tokens", "400", "--video-timeout", "120")
    with serve("demo", *limits, "--processor-arena-bytes", "512M") as engine:

        def send(data: bytes) -> int:
            url = "data:video/mp4;base64," + base64.b64encode(data).decode()
            part = {"type": "video_url", "video_url": {"url": url}, "max_pixels": 1 << 20, "do_sample_frames": False}
            body = chat_body([part], max_tokens=2)
            return httpx.post(f"{engine.url}/v1/chat/completions", json=body, timeout=300).status_code

        with Listener(engine) as other, ThreadPoolExecutor(10) as pool:
            num_before = other.num_chunks
            statuses = set(pool.map(send, [make() for make, _, _ in BAD.values()] * 3))
            num_chunks = other.num_chunks - num_before
        assert statuses == {400, 413, 422}
        assert num_chunks >= MIN_CHUNKS and other.num_unhealthy == 0
        assert send(encode(frames_of(8))) == 200
