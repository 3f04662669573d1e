"""Videos that are broken, or made to break: a 4xx that says why, and a right answer to the next request."""

import base64
import os
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.wire.config import EngineConfig
from server.checkpoint import Checkpoint
from server.errors import RequestError
from tests.eventually import eventually
from tests.unit.server.clips import claiming, encode, frames_of, gif, long_gif, of_jpegs, sound
from tests.unit.server.loading import Loading
from tests.unit.server.stack import StackOf
from tests.unit.server.test_stack_video import video

CLIP = encode(frames_of(20))


def with_size(data: bytes, size: int) -> bytes:
    return data[:6] + 2 * size.to_bytes(2, "little") + data[10:]


BAD: dict[str, tuple[Callable[[], bytes], int, str]] = {
    "no video": (lambda: b"x" * 1000, 422, "its format is not one of MP4, MOV, WebM, MKV, AVI, GIF"),
    "a playlist": (lambda: b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n" * 9, 422, "its format is not one of MP4"),
    "a list of files": (lambda: b"ffconcat version 1.0\nfile /etc/passwd\n" * 9, 422, "its format is not one of MP4"),
    "a cut mp4": (lambda: CLIP[:-200], 422, "it is damaged"),
    "a cut avi": (lambda: of_jpegs(frames_of(4))[:-99], 422, "it is truncated"),
    "noise in the frames": (lambda: CLIP[:900] + bytes(400) + CLIP[1300:], 422, "it is damaged"),
    "sound alone": (sound, 422, "it has no video stream"),
    "a million frames claimed": (lambda: claiming(CLIP, 10**6), 422, "it has no frames"),
    "65535 squared claimed": (lambda: with_size(gif(frames_of(2)), 65535), 422, "the size of its frames is not supported"),
    "9000 squared claimed": (lambda: with_size(gif(frames_of(2)), 9000), 400, "9000x9000 pixels, the limit is 4194304"),
    "frames of two sizes": (lambda: of_jpegs(frames_of(3) + frames_of(3, 32, 48)), 422, "change their size, from 96x64 to 48x32"),
    "a gif of 20,000 frames": (lambda: long_gif(20_000), 413, "more than 10000 frames"),
    "a codec that nobody sends": (lambda: encode(frames_of(3), "matroska", "ffv1"), 422, "it is damaged"),
    "a codec that nobody knows": (lambda: b"zzzz".join(CLIP.rsplit(b"avc1", 1)), 422, "its codec or the size"),
    "one frame": (lambda: encode(frames_of(1)), 400, "at least 2 frames"),
}


@pytest.fixture
async def strict(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Loading]:
    monkeypatch.setattr(EngineConfig, "max_video_file_frames", 10_000)
    monkeypatch.setattr(EngineConfig, "max_video_frame_pixels", 1 << 22)
    made = Loading(checkpoint, max_num_encoder_tokens=400)
    yield made
    await made.close()


async def refusal(loading: Loading, data: bytes, **fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await loading.load_video(base64.b64encode(data), **fields)
    message = caught.value.info.message
    assert message.startswith("Video 1: ") and "/" not in message
    return caught.value


@pytest.mark.hostile
@pytest.mark.gate
async def test_bad_files_are_refused_with_the_reason(strict: Loading) -> None:
    for name, (make, status, words) in BAD.items():
        error = await refusal(strict, make(), samples=False, max_pixels=1 << 20)
        assert (error.info.status, words in error.info.message) == (status, True), f"{name}: {error.info}"
        assert error.info.code in ("invalid_video", "video_too_large"), name
        await strict.release()
        assert strict.allocator.is_empty(), name
    assert (await strict.load_video(base64.b64encode(CLIP))).hashes


async def test_what_a_server_does_not_take(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if frames are decoded before they are counted, or if a file takes more memory than there may be."""
    few = Loading(checkpoint, max_video_frames=3)
    with pytest.raises(RequestError, match=r"4 of its frames would be sampled, the limit is 3"):
        await few.load_video(b"AA==,AA==,AA==,AA==", holds_frames=True)
    assert "20 of its frames would be sampled, the limit is 3" in (await refusal(few, CLIP, samples=False)).info.message
    monkeypatch.setattr(EngineConfig, "max_decoder_memory", 192 << 20)
    monkeypatch.setattr(EngineConfig, "max_video_frame_pixels", 1 << 27)
    small = Loading(checkpoint)
    error = await refusal(small, long_gif(3, 8000, 8000), samples=False)
    assert (error.info.status, "more than 192 MiB" in error.info.message) == (422, True), error.info
    assert (await small.load_video(base64.b64encode(CLIP))).hashes
    for made in (few, small):
        await made.close()


def test_ten_clients_at_once(stack_of: StackOf, model_folder: Path) -> None:
    """Red if text waits for decoders, answers are swapped, or clips do not wait for each other's memory."""
    small = stack_of(model_folder, max_video_bytes=1 << 20)
    assert small.chat([video(CLIP)]).status_code == 200
    decoders = small.local.processor._decoders
    started = [guest.process.pid for guest in decoders.pool.guests if guest.process is not None]
    for pid in started:
        os.kill(pid, signal.SIGSTOP)
    files = [encode(frames_of(40, 320, 480, first=i)) if i % 2 else encode(frames_of(40, first=i))[:-200] for i in range(10)]
    with ThreadPoolExecutor(10) as clients:
        answers = [clients.submit(small.chat, [video(data)]) for data in files]
        eventually(decoders._large.locked, "as many videos as may be decoded at once")
        assert small.chat("text").status_code == 200
        for pid in started:
            os.kill(pid, signal.SIGCONT)
        assert [answer.result().status_code for answer in answers] == [422, 200] * 5
        clips = [encode(frames_of(12, 640, 640, first=i)) for i in range(6)]  # of 32 MiB, each takes 14.7 MB as pixels
        answers = [clients.submit(small.chat, [video(data, fps=100.0)]) for data in clips]
        assert [answer.result().status_code for answer in answers] == [200] * 6
    refused = small.chat([video(b"\0\0\0\x18ftypmp42" + bytes(2 << 20))])
    assert refused.status_code == 413 and "larger than 1048576 bytes" in refused.json()["error"]["message"]
    assert small.chat([{"type": "video_url", "video_url": {"url": "data:video/mp4;base64,"}}]).status_code == 422
    small.recover()
