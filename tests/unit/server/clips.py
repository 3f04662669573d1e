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
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream(codec, rate=Fraction(fps).limit_denominator(1001), options={"g": str(gap), "crf": "12"})
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = pixels
        for frame in frames:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        file.mux(stream.encode())
    return out.getvalue()


def gif(frames: Sequence[np.ndarray]) -> bytes:
    images = [Image.fromarray(frame) for frame in frames]
    return save(images[0], "GIF", save_all=True, append_images=images[1:], duration=100, loop=0)


def joined(frames: Sequence[np.ndarray], kind: str = "PNG") -> bytes:
    return b",".join(base64.b64encode(save(Image.fromarray(frame), kind)) for frame in frames)


def of_jpegs(frames: Sequence[np.ndarray]) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="avi") as file:
        stream = file.add_stream("mjpeg", rate=10)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "yuvj420p"
        for i, frame in enumerate(frames):
            packet = av.Packet(save(Image.fromarray(frame), "JPEG"))
            packet.stream, packet.pts, packet.dts, packet.time_base, packet.is_keyframe = stream, i, i, Fraction(1, 10), True
            file.mux(packet)
    return out.getvalue()


def sound() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        for packet in (*stream.encode(frame), *stream.encode()):
            file.mux(packet)
    return out.getvalue()


def claiming(data: bytes, count: int) -> bytes:
    patched = bytearray(data)
    sizes, times, chunks = (patched.index(name) + 4 for name in (b"stsz", b"stts", b"stsc"))
    patched[sizes + 4 : sizes + 12] = (1).to_bytes(4, "big") + count.to_bytes(4, "big")
    patched[times + 8 : times + 12] = count.to_bytes(4, "big")
    patched[chunks + 12 : chunks + 16] = count.to_bytes(4, "big")
    return bytes(patched)


def long_gif(count: int, height: int = 8, width: int = 8) -> bytes:
    whole = save(Image.new("P", (width, height)), "GIF")
    start = whole.index(b",")  # the first image; its control block is written anew
    control = b"\x21\xf9\x04\x04\x0a\x00\x00\x00"
    return whole[:start] + (control + whole[start:-1]) * count + b";"


def trimmed(data: bytes, start: float, seconds: float) -> bytes:
    patched = bytearray(data)
    edit, movie, media = (patched.index(name) + 4 for name in (b"elst", b"mvhd", b"mdhd"))
    movie_scale, media_scale = (int.from_bytes(patched[box + 12 : box + 16], "big") for box in (movie, media))
    begin = int.from_bytes(patched[edit + 12 : edit + 16], "big") + round(start * media_scale)
    patched[edit + 8 : edit + 16] = round(seconds * movie_scale).to_bytes(4, "big") + begin.to_bytes(4, "big")
    return bytes(patched)
