"""A batch of which nvImageCodec rejects one header; the library itself is tested in tests/gpu."""

import os
from collections.abc import Sequence

import pytest
import torch

from models.kernels.triton.jpeg import NvImageCodecDecoder, without_output


def test_a_rejected_header_fails_its_own_image_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: NvImageCodecDecoder, payloads: Sequence[memoryview]) -> list[torch.Tensor | None]:
        if any(payload[0] == 0 for payload in payloads):
            raise RuntimeError("BAD_CODESTREAM")
        return [torch.zeros(1) for _ in payloads]

    monkeypatch.setattr(NvImageCodecDecoder, "_decode", decode)
    decoder = object.__new__(NvImageCodecDecoder)
    found = decoder.decode([memoryview(b"good"), memoryview(b"\0bad"), memoryview(b"good")])
    assert [pixels is None for pixels in found] == [False, True, False] and decoder.decode([]) == []


def test_what_a_library_prints_is_discarded(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(2, b"before ")
    with pytest.raises(ImportError), without_output():
        os.write(1, b"codec ")
        os.write(2, b"codec ")
        raise ImportError
    os.write(2, b"after")
    assert capfd.readouterr() == ("", "before after")
