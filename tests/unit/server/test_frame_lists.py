"""Videos as lists of frames: their number is checked before anything is cut, and turned frames are upright."""

import base64
import io
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from engine.messages import MediaRef
from server.checkpoint import Checkpoint
from server.errors import RequestError
from server.processor import image, video
from server.processor.intake import Intake
from server.processor.video import FrameList
from tests.unit.server.clips import frames_of
from tests.unit.server.loading import Loading
from tests.unit.server.pictures import turned

NUM_COMMAS = 100_000


async def test_too_many_frames_are_counted_before_they_are_cut(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """`data:video/jpeg;base64,` and commas: one object per comma stopped the event loop and filled the memory."""
    made = Loading(checkpoint)
    num_cut: list[object] = []

    def cut(*arguments: Any, **fields: Any) -> MediaRef:
        num_cut.append(fields)
        return MediaRef(*arguments, **fields)

    commas = b"," * NUM_COMMAS
    for file in (made.body(commas), MediaRef(url="data:video/jpeg;base64," + commas.decode())):
        with monkeypatch.context() as patch:
            patch.setattr(video, "MediaRef", cut)
            frames = FrameList(made.tools, video.VideoRef(file=file, holds_frames=True), [])
            with pytest.raises(RequestError, match=f"{NUM_COMMAS + 1} of its frames would be seen, the limit is") as caught:
                await frames._load(video.Allowance(1 << 30, 8))
            await frames.release()
        assert caught.value.info.status == 400
    assert not num_cut
    await made.close()


async def test_listed_frames_are_counted_before_they_become_images(checkpoint: Checkpoint) -> None:
    """A request may list thousands of frames in each of many videos; each became an object on the event loop."""
    made = Loading(checkpoint, max_video_frames=3)
    intake: Any = SimpleNamespace(config=SimpleNamespace(max_video_frames=3), tools=made.tools)
    created: list[MediaRef] = []
    intake._image = lambda ref, early, is_frame: created.append(ref) or image.Image(made.tools, ref, is_frame)
    listed = Intake._medium(intake, video.VideoRef(frames=[MediaRef(url="data:,x")] * 1000), {})
    assert len(created) == 4
    with pytest.raises(RequestError, match="1000 of its frames would be seen, the limit is 3"):
        await listed._load(video.Allowance(1 << 30, 8))
    await listed.release()
    await made.close()


async def test_a_long_header_is_not_copied_to_each_frame(checkpoint: Checkpoint) -> None:
    """A header of megabytes became part of the URL of each of hundreds of frames."""
    made = Loading(checkpoint)
    frames = FrameList(made.tools, video.VideoRef(), [])
    for url in ("data:video/jpeg;x=%s;base64,a,b" % ("y" * 5000), "data:video/jpeg;base64,a,b"):
        assert [ref.url for ref in await frames._cut(MediaRef(url=url))] == ["data:;base64,a", "data:;base64,b"]
    await frames.release()
    await made.close()


async def test_frames_with_an_orientation_are_upright(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size in the header was compared with the upright size: photographs of phones were refused."""
    monkeypatch.setattr("server.processor.inspect.MAX_JPEG_PIXELS", 1000)  # a larger baseline JPEG is decoded here
    made = Loading(checkpoint)
    kinds: list[tuple[str, dict[str, bool]]] = [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("TIFF", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
    ]
    for (kind, options), orientation in itertools.product(kinds, range(1, 9)):
        files = [turned(kind, orientation, Image.fromarray(frame), **options) for frame in frames_of(2)]
        loaded = await made.load_video(b",".join(map(base64.b64encode, files)), holds_frames=True)
        images = [ImageOps.exif_transpose(Image.open(io.BytesIO(file))) for file in files]
        height, width = loaded.plan.size
        expected = np.stack([np.asarray(image.resize((width, height), Image.Resampling.BICUBIC)) for image in images])
        assert (height > width) == (orientation >= 5) and (made.pairs_of(loaded)[0] == expected).all(), (kind, orientation)
        await made.release()
    await made.close()
