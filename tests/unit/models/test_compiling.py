"""What is compiled in advance, without Triton: `backends/portable/test_targets.py` has that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.kernels.compiling import THIS_THREAD, compiling

VERSIONS = (32, 5, 7, 4), (33, 6, 7, 4), (1, 7, 7, 4), (32, 5, 8, 4), (32, 5, 7, 8)  # size, tokens, constant, warps
OTHERS = (64, 6, 7, 4), (32, 1, 7, 4), (17, 16, 7, 4)


class Jitted:
    def __init__(self) -> None:
        self.params = [SimpleNamespace(is_constexpr=i == 3, do_not_specialize=i == 2) for i in range(4)]
        self.compiled: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], num_warps: int) -> None:
        assert THIS_THREAD.compiler is None and grid == (1,)
        self.compiled.append((*args[1:], num_warps))


def test_each_version_of_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    jitted, x = Jitted(), torch.zeros(3)
    with compiling(torch.device("cpu")):
        compiler = THIS_THREAD.compiler
        assert compiler is not None
        for *args, warps in VERSIONS + OTHERS:
            compiler(jitted, (1,), (x, *args), {"num_warps": warps})
    assert sorted(jitted.compiled) == sorted(VERSIONS) and set(devices) == {torch.device("cpu")}
