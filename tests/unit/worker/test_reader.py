"""What the worker reads images from: encodings that a plan may name."""

import io
from collections.abc import Sequence
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from PIL import Image

from engine.arena import ArenaView, create_memfd
from engine.messages import ImageSource, Region
from engine.worker.jpeg import ImageReader
from models.kernels.reference.jpeg import PillowDecoder

CPU = torch.device("cpu")


def test_a_plan_without_pixels_is_a_bug() -> None:
    """Red if a file is taken for RGB."""
    reader = ImageReader(ArenaView(create_memfd("arena", 4096), 4096), PillowDecoder(1, CPU), CPU)
    with pytest.raises(AssertionError, match="without its pixels"):
        reader.read([ImageSource("file", Region(1, 0, 12), 2, 2)])


@pytest.mark.parametrize("free", [0, 1 << 30])
def test_a_decoder_that_lacks_memory_is_not_the_clients_fault(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is a damaged image the engine's."""
    there = Announced()
    source = ImageSource("jpeg", there.put(0, jpeg(1)), 40, 56)
    monkeypatch.setattr(there, "decode", lambda payloads: [None for _ in payloads])  # what a GPU's decoder says in either case
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 33))
    there.reader._stream = MagicMock()
    if free:
        assert there.reader._read([source], [memoryview(b"")]) == [None]
    else:
        with pytest.raises(torch.OutOfMemoryError):
            there.reader._read([source], [memoryview(b"")])


class Announced:
    """An arena with JPEGs at given places, a reader of it, and how often it decoded."""

    def __init__(self) -> None:
        self.arena = ArenaView(create_memfd("arena", 1 << 20), 1 << 20, writable=True)
        self.num_decoded = 0
        self._pillow = PillowDecoder(1, CPU)
        self.reader = ImageReader(self.arena, self, CPU)

    def decode(self, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        self.num_decoded += len(payloads)
        return self._pillow.decode(payloads)

    def put(self, offset: int, data: bytes) -> Region:
        self.arena.view(offset, len(data))[:] = data
        return Region(1, offset, len(data))


def jpeg(seed: int, height: int = 40, width: int = 56, **options: object) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def test_a_copy_is_what_is_decoded() -> None:
    """Whatever is written to its place meanwhile."""
    there = Announced()
    source = ImageSource("jpeg", there.put(0, jpeg(1)), 40, 56, ticket=7)
    (expected,) = there.reader.read([source])
    read = there.reader.read_copy(source)
    there.put(0, jpeg(9))
    assert read is not None and expected is not None and torch.equal(read[0], expected) and read[1].startswith(jpeg(1))


@pytest.mark.parametrize("data", [jpeg(1, 64, 64), jpeg(1, progressive=True), b"\xff\xd8 anything \xff\xd9", b"\0" * 500])
def test_bytes_that_nobody_has_checked_are_not_decoded(data: bytes) -> None:
    """A client may leave what was refused where an announced image was."""
    there = Announced()
    region = there.put(0, data)
    assert there.reader.read_copy(ImageSource("jpeg", region, 40, 56)) is None and there.num_decoded == 0
