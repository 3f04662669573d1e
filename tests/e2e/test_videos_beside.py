"""Ten clients that send broken videos all the time: a stream of somebody else goes on."""

import base64
import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from tests.e2e.serving import chat_body, serve
from tests.e2e.stalls import STALL_S, stall_beside
from tests.unit.server.clips import encode, frames_of
from tests.unit.server.test_bad_videos import BAD

pytestmark = pytest.mark.hostile

NUM_CLIENTS = 10


def question(data: bytes) -> dict[str, object]:
    url = "data:video/mp4;base64," + base64.b64encode(data).decode()
    part = {"type": "video_url", "video_url": {"url": url}, "max_pixels": 1 << 20, "do_sample_frames": False}
    return chat_body([part], max_tokens=2)


@contextmanager
def asked(url: str, bodies: list[bytes], statuses: set[int]) -> Iterator[None]:
    """Meanwhile clients send these files in turn."""
    done = threading.Event()

    def send(first: int) -> None:
        with httpx.Client(timeout=120) as client:
            for i in itertools.count(first):
                if done.is_set():
                    return
                statuses.add(client.post(f"{url}/v1/chat/completions", json=question(bodies[i % len(bodies)])).status_code)

    clients = [threading.Thread(target=send, args=(i,)) for i in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    yield
    done.set()
    for client in clients:
        client.join()


def test_streams_of_others_go_on() -> None:
    """Red if a file that is refused, or its decoder, takes the cores of the model, if one is answered by anything but a 4xx, or if a good
    clip is not answered afterwards."""
    bodies = [make() for make, _, _ in BAD.values()]
    with serve("demo", "--video-timeout", "4", "--max-video-file-frames", "10000", "--processor-arena-bytes", "512M") as engine:
        statuses: set[int] = set()
        stall = stall_beside(engine, lambda: asked(engine.url, bodies, statuses), 8.0)
        good = engine.client.post("/v1/chat/completions", json=question(encode(frames_of(8))))
        assert good.status_code == 200, good.text
        assert statuses == {400, 413, 422}
        assert stall < STALL_S
