"""What the GPU decoder's wrapper makes of a library that raises; the library itself is tested in tests/gpu."""

import sys
import types
from collections.abc import Sequence
from unittest.mock import MagicMock

import pytest
import torch

from models.backends.portable.jpeg import NvImageCodecDecoder


def test_a_header_that_the_library_rejects_fails_its_own_image_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Red if one strange JPEG, for which nvImageCodec raises, ends the worker or takes the images beside it along."""

    def decode(streams: Sequence[bytes], **_: object) -> list[MagicMock]:
        if any(stream[0] == 0 for stream in streams):
            raise RuntimeError("BAD_CODESTREAM")
        return [MagicMock() for _ in streams]

    library = types.SimpleNamespace(CodeStream=bytes, Decoder=MagicMock(), DecodeParams=MagicMock(), ColorSpec=MagicMock())
    monkeypatch.setitem(sys.modules, "nvidia", types.SimpleNamespace(nvimgcodec=library))
    monkeypatch.setattr(torch.cuda, "current_stream", MagicMock())
    monkeypatch.setattr(torch, "from_dlpack", lambda capsule: torch.zeros(1))
    decoder = NvImageCodecDecoder(1, torch.device("cuda", 0))
    decoder._decoder.decode = decode
    found = decoder.decode([memoryview(b"good"), memoryview(b"\0bad"), memoryview(b"good")])
    assert [pixels is None for pixels in found] == [False, True, False]
