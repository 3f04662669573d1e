"""Launch options and device helpers of Triton kernels."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAP_CAPABILITY = (9, 0)  # compute capability from which programmatic dependent launch is available


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability, (0, 0) for a CPU with Triton's interpreter."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def early_launch(x: torch.Tensor) -> dict[str, bool]:
    """Return launch options of a kernel that, with OVERLAP, waits for the previous kernel itself."""
    return {"OVERLAP": True, "launch_pdl": True} if capability_of(x.device) >= OVERLAP_CAPABILITY else {"OVERLAP": False}


@triton.jit
def await_previous_kernel(OVERLAP: constexpr) -> None:
    """Wait until the previous kernel's writes are visible, and let the next kernel start."""
    if OVERLAP:
        gdc_wait()
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
