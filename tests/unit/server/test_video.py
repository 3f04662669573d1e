"""Videos on their way in, as files and as lists of frames: the wanted frames, a hash per pair, no decoding of what is known."""

import base64
import io
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from engine.wire.messages import MediaRef, VideoRef
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor.media.video import FrameList, VideoFile
from tests.unit.server.clips import encode, frames_of, joined, trimmed
from tests.unit.server.loading import Loading

FORMATS: dict[str, dict[str, Any]] = {
    "h264 mp4": {}, "h264 mov": {"container": "mov"}, "h264 10 bits": {"pixels": "yuv420p10le"},
    "h265 mkv": {"container": "matroska", "codec": "libx265"}, "vp9 webm": {"container": "webm", "codec": "libvpx-vp9"},
    "vp8 webm": {"container": "webm", "codec": "libvpx"}, "av1 mp4": {"codec": "libsvtav1"},
    "mpeg4 avi": {"container": "avi", "codec": "mpeg4"},
}  # fmt: skip


def nearest(image: np.ndarray, frames: list[np.ndarray]) -> int:
    return int(np.argmin([np.abs(image.astype(int) - frame).mean() for frame in frames]))


needs_ffmpeg = pytest.mark.skipif(shutil.which("ffmpeg") is None, reason="ffmpeg is not installed")


def b64(data: bytes) -> bytes:
    return base64.b64encode(data)


def resized(frame: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    return np.asarray(Image.fromarray(frame).resize(size[::-1], Image.Resampling.BICUBIC))


def shown(loading: Loading, video: VideoFile | FrameList) -> np.ndarray:
    return loading.pairs_of(video).reshape(-1, *video.plan.size, 3)


async def test_wanted_frames_of_common_files(loading: Loading) -> None:
    frames = frames_of(25)
    for name, options in FORMATS.items():
        video = await loading.load_video(b64(encode(frames, **options)), fps=4.0)
        indices = np.linspace(0, 24, 10).round().astype(int).tolist()
        assert (video.plan.indices, video.plan.size, len(set(video.hashes))) == (indices, (64, 96), 5), name
        assert [nearest(image, frames) for image in shown(loading, video)] == indices, name
        assert video.plan.times == pytest.approx([(a + b) / 20 for a, b in zip(indices[::2], indices[1::2], strict=True)]), name
        await loading.release()


@needs_ffmpeg
async def test_pixels_are_ffmpegs(loading: Loading, tmp_path: Path) -> None:
    made, cut = tmp_path / "made.mp4", tmp_path / "cut.mp4"
    source = "-f lavfi -i testsrc2=size=320x240:rate=30000/1001:duration=2"
    full_range, variable_rate = "-vf scale=374:210 -colorspace bt709 -color_range pc", "-vf select=gt(mod(n\\,7)\\,2) -vsync vfr"
    for options in ("", full_range, variable_rate, "-vf scale=101:67 -pix_fmt yuv444p"):
        ffmpeg(*source.split(), *options.split(), "-c:v", "libx264", "-g", "12", "-bf", "2", str(made))
        ffmpeg("-ss", "0.3", "-i", str(made), "-c", "copy", "-metadata:s:v", "rotate=90", str(cut))
        for file in (made, cut):
            video = await loading.load_video(b64(file.read_bytes()), num_frames=6, max_pixels=1 << 20)
            sizes = ["-sws_flags", "bilinear", "-vsync", "passthrough", "-f", "rawvideo", "-pix_fmt", "rgb24"]
            raw = np.frombuffer(ffmpeg("-i", str(file), *sizes, "-"), np.uint8)
            first = Image.open(io.BytesIO(ffmpeg("-i", str(file), "-frames:v", "1", "-f", "image2pipe", "-c:v", "png", "-")))
            expected = raw.reshape(-1, first.height, first.width, 3)
            assert video.plan.indices == np.linspace(0, len(expected) - 1, 6).round().astype(int).tolist()
            want = np.stack([resized(expected[index], video.plan.size) for index in video.plan.indices])
            assert np.array_equal(shown(loading, video), want), options
            await loading.release()


def ffmpeg(*arguments: str) -> bytes:
    return subprocess.run(["ffmpeg", "-loglevel", "error", "-y", *arguments], check=True, capture_output=True).stdout


async def test_what_an_edit_list_leaves(loading: Loading) -> None:
    frames = frames_of(40)
    video = await loading.load_video(b64(trimmed(encode(frames, gap=10), start=1.5, seconds=1.0) + b"\xff" * 99), samples=False)
    assert [nearest(image, frames) for image in shown(loading, video)] == list(range(15, 25))


async def test_pairs_are_decoded_on_demand(loading: Loading) -> None:
    data = b64(encode(frames_of(20)))
    video = await loading.load_video(data)
    pixels, hashes = loading.pairs_of(video), video.hashes
    assert (await loading.decode(video, 1) == pixels[1:2]).all()
    again, other = await loading.load_video(data), await loading.load_video(data, fps=4.0)
    assert (again.hashes, again.plan) == (hashes, video.plan) and not {*other.hashes} & {*hashes}


async def test_pairs_of_overlapping_lists_are_the_same(loading: Loading) -> None:
    frames = frames_of(12)
    whole = await loading.load_video(joined(frames[:8]), holds_frames=True)
    half = await loading.load_video(joined(frames[4:]), holds_frames=True)
    assert whole.plan.size == half.plan.size
    assert half.hashes[:2] == whole.hashes[2:] and not {*half.hashes[2:]} & {*whole.hashes}
    assert (await loading.decode(half, 1) == np.stack(frames[6:8])).all()


async def test_an_odd_number_of_frames_and_limits_on_pixels(loading: Loading) -> None:
    frames = joined(frames_of(3))
    for limits, size in (({}, (64, 96)), ({"min_pixels": 60_000}, (128, 192)), ({"max_pixels": 9_000}, (32, 64))):
        video = await loading.load_video(frames, holds_frames=True, **limits)
        assert (video.plan.indices, video.plan.size) == ([0, 1, 2, 2], size), limits
        await loading.release()


async def test_many_frames(loading: Loading) -> None:
    frames = frames_of(900, 32, 64)
    video = await loading.load_video(b64(encode(frames, fps=1.0, gap=50)), max_pixels=1 << 21)
    assert (len(video.plan.indices), len(video.hashes), video.plan.size) == (768, 384, (32, 64))
    far = await loading.load_video(b64(encode(frames, gap=50)), num_frames=8, max_pixels=1 << 21)
    for one in (video, far):
        found = shown(loading, one).astype(int)
        for i in range(0, len(found), max(1, len(found) // 50)):
            assert np.abs(found[i] - frames[one.plan.indices[i]]).mean() < 12, i


async def refusal(loading: Loading, text: bytes, **fields: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await loading.load_video(text, **fields)
    assert caught.value.info.message.startswith("Video 1: ")
    return caught.value


async def test_lists_that_are_refused(loading: Loading) -> None:
    two = frames_of(2)
    mixed = [two[0], frames_of(1, 32, 32)[0]]
    for frames, fields, words in [
        (two[:1], {}, "at least 2 frames"),
        (mixed, {}, "its frames differ in size: 96x64 and 32x32 pixels"),
        (two, {"min_pixels": 9000, "max_pixels": 8000}, "exceed"),
    ]:
        error = await refusal(loading, joined(frames), holds_frames=True, **fields)
        assert error.info.status == 400 and words in error.info.message and error.info.code in ("invalid_video", "invalid_value")
    error = await refusal(loading, joined(two) + b"," + b64(b"no picture"), holds_frames=True)
    assert (error.info.status, error.info.code) == (422, "invalid_image")


NUM_COMMAS = 100_000


async def test_too_many_frames_are_counted_before_they_become_images(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Loading(checkpoint, max_video_frames=3)
    created: list[MediaRef] = []
    image_of = lambda ref: created.append(ref) or made.new_image(ref)  # noqa: E731
    monkeypatch.setattr("server.processor.media.video.Image", lambda images, ref: image_of(ref))
    commas = b"," * NUM_COMMAS
    files = made.body(commas), MediaRef(url="data:video/jpeg;base64," + commas.decode())
    refs = [VideoRef(file=file, holds_frames=True) for file in files]
    for ref, num_frames in zip([*refs, VideoRef(frames=[MediaRef(url="data:,x")] * 1000)], [NUM_COMMAS + 1] * 2 + [1000], strict=True):
        listed = made.videos.make(ref, image_of)
        with pytest.raises(RequestError, match=f"{num_frames} of its frames would be sampled, the limit is 3") as caught:
            await listed.load()
        assert caught.value.info.status == 400
        await listed.release()
    assert len(created) == 4  # of the list
    await made.close()


async def test_a_long_header_is_not_copied_to_each_frame(checkpoint: Checkpoint) -> None:
    made = Loading(checkpoint)
    frames = FrameList(made.videos, VideoRef(), [])
    for url in ("data:video/jpeg;x=%s;base64,a,b" % ("y" * 5000), "data:video/jpeg;base64,a,b"):
        assert [ref.url for ref in await frames._cut(MediaRef(url=url))] == ["data:;base64,a", "data:;base64,b"]
    await frames.release()
    await made.close()
