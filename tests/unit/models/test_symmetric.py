"""Which GPUs may sum in symmetric memory. The sums are tested on GPUs."""

import itertools

import pytest
import torch

from models.parallel import symmetric
from models.parallel.symmetric import peers_are_mapped


def test_every_pair_needs_access_and_atomics(monkeypatch: pytest.MonkeyPatch) -> None:
    mapped = atomics = set(itertools.permutations(range(3), 2))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda i, j: (i, j) in mapped)
    monkeypatch.setattr(symmetric, "_has_native_atomics", lambda i, j: (i, j) in atomics)
    assert peers_are_mapped(3)
    for pair in sorted(mapped):
        mapped = atomics - {pair}
        assert not peers_are_mapped(3), pair
        mapped, atomics = atomics, mapped
        assert not peers_are_mapped(3), pair
        atomics = mapped
