"""Which GPUs may sum in symmetric memory, with CUDA's answers replaced; the sums themselves are tested on GPUs."""

import ctypes
from types import SimpleNamespace

import pytest
import torch

from models.symmetric import NATIVE_ATOMICS, peers_are_mapped


@pytest.mark.parametrize(
    ("mapped", "atomics", "status", "expected"), [(1, 1, 0, True), (0, 1, 0, False), (1, 0, 0, False), (1, 1, 1, False)]
)
@pytest.mark.parametrize("pair", [(0, 1), (2, 1)])
def test_every_pair_needs_access_and_atomics(
    monkeypatch: pytest.MonkeyPatch, mapped: int, atomics: int, status: int, expected: bool, pair: tuple[int, int]
) -> None:
    """Red if one pair without either is enough for memory in which ranks would wait for each other for ever."""

    def attribute(value: object, kind: int, device: int, peer: int) -> int:
        assert kind == NATIVE_ATOMICS
        value._obj.value = atomics if (device, peer) == pair else 1  # type: ignore[attr-defined]
        return status if (device, peer) == pair else 0

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: bool(mapped) or (i, j) != pair)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(cuDeviceGetP2PAttribute=attribute))
    assert peers_are_mapped(3) is expected
