"""Launches by calls of the driver: what reaches it, and when Triton is asked."""

import ctypes
import importlib.util
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.models.backends.portable.interpreter import INTERPRETED

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None or INTERPRETED, reason="needs Triton's compiler")

FUNCTION, STREAM, DEVICE = 7, 11, 0


class Driver:
    """Records the calls of `cuLaunchKernelEx`; `asked` are the arguments of launches by Triton."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self.asked: list[tuple[Any, ...]] = []
        self.signature: dict[str, str] = {}
        self.bits: list[int] = []

    def launch(self, config: int, function: int, parameters: Any, extra: None) -> int:
        assert function == FUNCTION and extra is None
        fields = ctypes.cast(config, ctypes.POINTER(ctypes.c_uint32 * 8))[0]
        values = [ctypes.cast(place, ctypes.POINTER(ctypes.c_int64 if bits == 64 else ctypes.c_int32))[0]
                  for place, bits in zip(parameters, self.bits, strict=True)]  # fmt: skip
        self.calls.append((tuple(fields[:7]), tuple(values)))
        return 0 if fields[0] else 1

    def compile(self, *args: Any, **options: Any) -> Any:
        self.asked.append(args)
        types = {int: "i32", float: "fp32", type(None): "constexpr"}
        self.signature = {str(i): "*bf16" if isinstance(x, torch.Tensor) else types[type(x)] for i, x in enumerate(args)}
        if args[1] == 1:
            self.signature["1"] = "constexpr"
        self.bits = [64 if each.startswith("*") else 32 for each in self.signature.values() if each != "constexpr"] + [64, 64]
        params = ",".join(f".param .b{bits} p" for bits in self.bits)
        metadata = SimpleNamespace(name="_k", num_warps=4, shared=64, launch_pdl=False, num_ctas=1, global_scratch_size=0,
                                   profile_scratch_size=0, launch_cooperative_grid=False)  # fmt: skip
        source, asm = SimpleNamespace(signature=self.signature), {"ptx": f".visible .entry _k({params})"}
        return SimpleNamespace(src=source, asm=asm, metadata=metadata, function=FUNCTION)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    from triton.runtime.jit import KernelInterface

    from models.kernels.triton import launch

    driver = Driver()
    active = SimpleNamespace(get_current_device=lambda: DEVICE, get_current_stream=lambda device: STREAM)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "driver_function", lambda: driver.launch)
    monkeypatch.setattr(KernelInterface, "__getitem__", lambda kernel, grid: driver.compile)
    return driver


@pytest.fixture
def kernel() -> Any:
    from models.kernels.triton.launch import kernel

    def _k(x: Any, count: Any, scale: Any, total: Any, BLOCK: Any) -> None: ...

    return kernel(do_not_specialize=["total"])(_k)


def test_later_launches_are_calls_of_the_driver(driver: Driver, kernel: Any) -> None:
    x, y = torch.zeros(64, dtype=torch.bfloat16), torch.ones(64, dtype=torch.bfloat16)
    kernel[(3, 2)](x, 5, 1.0, 1, BLOCK=8)
    kernel[(4,)](y, 7, 1.0, 2, BLOCK=8)
    assert len(driver.asked) == 1
    one = int.from_bytes(ctypes.string_at(ctypes.addressof(ctypes.c_float(1.0)), 4), "little")
    assert driver.calls == [((4, 1, 1, 128, 1, 1, 64), (y.data_ptr(), 7, one, 2, 0, 0))]


CHANGES: dict[str, Callable[[list[Any]], Any]] = {
    "a type": lambda args: args.__setitem__(0, torch.zeros(64)),
    "a constant 1": lambda args: args.__setitem__(1, 1),
    "a multiple of 16": lambda args: args.__setitem__(1, 32),
    "an absent tensor": lambda args: args.__setitem__(0, None),
    "an address": lambda args: args.__setitem__(0, args[0][1:]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_triton_compiles_for_other_arguments(driver: Driver, kernel: Any, change: str) -> None:
    args: list[Any] = [torch.zeros(64, dtype=torch.bfloat16), 5, 1.0, 1]
    kernel[(1,)](*args, BLOCK=8)
    CHANGES[change](args)
    for _ in range(2):
        kernel[(1,)](*args, BLOCK=8)
    assert len(driver.asked) == 2 and len(driver.calls) == 1


def test_triton_compiles_for_other_constants(driver: Driver, kernel: Any) -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    for block in (8, 16, 8):
        kernel[(1,)](x, 5, 1.0, 1, BLOCK=block)
    assert len(driver.asked) == 2 and len(driver.calls) == 1


def test_a_kernel_with_other_parameters_is_left_to_triton(
    driver: Driver, kernel: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from models.kernels.triton import launch

    monkeypatch.setattr(launch, "BITS", launch.re.compile("no"))
    for _ in range(3):
        kernel[(1,)](torch.zeros(64, dtype=torch.bfloat16), 5, 1.0, 1, BLOCK=8)
    assert len(driver.asked) == 3 and not driver.calls
    assert len(caplog.records) == 1


def test_an_error_of_the_driver_is_raised(driver: Driver, kernel: Any) -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    kernel[(1,)](x, 5, 1.0, 1, BLOCK=8)
    with pytest.raises(RuntimeError, match="_k failed"):
        kernel[(0,)](x, 5, 1.0, 1, BLOCK=8)
