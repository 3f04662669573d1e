"""Video files and frames of known content, for tests."""

import base64
import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
from PIL import Image

from tests.unit.server.pictures import save


def frames_of(count: int, height: int = 64, width: int = 96, first: int = 0) -> list[np.ndarray]:
    """Frame i is a grey of its own with a moving bar: close to itself after any codec, and far from all others."""
    frames = []
    for i in range(first, first + count):
        frame = np.full((height, width, 3), 20 + 37 * i % 200, np.uint8)
        left = 4 * i % max(1, width - 8)
        frame[:, left : left + 8] = (255, 20 * i % 256, 0)
        frames.append(frame)
    return frames


def encode(
    frames: Sequence[np.ndarray], container: str = "mp4", codec: str = "libx264", fps: float = 10.0, gap: int = 6, pixels: str = "yuv420p"
) -> bytes:
    """A file of these frames, with a keyframe every `gap`."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options={"g": str(gap), "crf": "12"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def gif(frames: Sequence[np.ndarray], milliseconds: int = 100) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    return save(images[0], "GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)


def joined(frames: Sequence[np.ndarray], kind: str = "PNG") -> bytes:
    """Base64 of the frames with commas between."""
    return b",".join(base64.b64encode(save(Image.fromarray(frame), kind)) for frame in frames)
