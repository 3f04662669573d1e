"""Launches of Triton kernels, and helpers of kernels."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from models.kernels.compiling import THIS_THREAD

OVERLAP_CAPABILITY = (9, 0)  # compute capability from which programmatic dependent launch is available


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def power_of_2(least: int) -> int:
    """Return the smallest power of two that is at least `least`. Triton's own function takes 3 us."""
    return 1 << (least - 1).bit_length()


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, (0, 0) for a CPU with Triton's interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


class Kernel:
    """A kernel of `triton.jit`. One that has OVERLAP waits for the previous kernel itself, where programmatic dependent launch is
    available."""

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self._overlaps = "OVERLAP" in jitted.arg_names

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        if self._overlaps:
            device = next(each.device for each in args if isinstance(each, torch.Tensor))
            options |= {"OVERLAP": True, "launch_pdl": True} if capability_of(device) >= OVERLAP_CAPABILITY else {"OVERLAP": False}
        if (compiler := THIS_THREAD.compiler) is None:
            self.jitted[grid](*args, **options)
        else:
            compiler(self.jitted, grid, args, options)


def kernel(**options: Any) -> Callable[[Callable[..., None]], Kernel]:
    """Decorate a kernel, with options of `triton.jit`."""
    return lambda function: Kernel(triton.jit(function, **options))


@triton.jit
def await_previous_kernel(OVERLAP: constexpr) -> None:
    """Wait until the previous kernel's writes are visible, and let the next kernel start."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def start_next_kernel(OVERLAP: constexpr, EARLY: constexpr) -> None:
    """If EARLY, let the next kernel start even before the previous one has ended."""
    if OVERLAP and EARLY:
        gdc_launch_dependents()


@triton.jit
def await_kernel(OVERLAP: constexpr) -> None:
    """Wait like `await_previous_kernel`, without letting the next kernel start."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def floats(place: tensor, mask: tensor) -> tensor:
    """Load values as float32, 0 outside the mask."""
    return tl.load(place, mask, 0.0).to(tl.float32)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors, 1 on a CPU with Triton's interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
