"""What is compiled in advance, without Triton: `backends/portable/test_targets.py` has that."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.kernels.compiling import compiler_of_thread, compiling

SEVERAL = (32, 5, 7, 4), (64, 6, 7, 4), (33, 6, 7, 4), (1, 7, 7, 4), (32, 1, 7, 4), (32, 5, 8, 4), (32, 5, 7, 8)


class Jitted:
    def __init__(self) -> None:
        self.params = [SimpleNamespace(is_constexpr=i == 3, do_not_specialize=i == 2) for i in range(4)]
        self.compiled: list[tuple[Any, ...]] = []

    def warmup(self, *args: Any, grid: tuple[int, ...], **options: Any) -> None:
        assert compiler_of_thread() is None and grid == (1,)
        self.compiled.append((*args, *options.items()))


def test_each_version_of_a_kernel_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    jitted, x = Jitted(), torch.zeros(3)
    with compiling(torch.device("cpu")):
        compiler = compiler_of_thread()
        assert compiler is not None
        for size, tokens, constant, warps in SEVERAL:
            compiler.add(jitted, (1,), (x, size, tokens, constant), {"num_warps": warps})
        compiler.add(jitted, (1,), (x.half(), 32, 5, 7), {"num_warps": 4})
    versions = {(args[0], args[1], *args[3:]) for args in jitted.compiled}
    option = [("num_warps", warps) for warps in (4, 8)]
    float32, half = torch.float32, torch.float16
    assert versions == {
        (float32, 32, 7, option[0]), (float32, 33, 7, option[0]), (float32, 1, 7, option[0]), (float32, 32, 8, option[0]),
        (float32, 32, 7, option[1]), (half, 32, 7, option[0]),
    }  # fmt: skip
    assert len(jitted.compiled) == len(versions) and set(devices) == {torch.device("cpu")}
