"""How our Triton kernels are launched on this device."""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

OVERLAP_CAPABILITY = (9, 0)  # from here on a kernel may begin while the one before it ends (programmatic dependent launch)


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """(0, 0) of a CPU, where Triton's interpreter runs kernels."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def early_launch(x: torch.Tensor) -> dict[str, bool]:
    """Options of a kernel that, with OVERLAP, waits for the kernel before it by itself."""
    return {"OVERLAP": True, "launch_pdl": True} if capability_of(x.device) >= OVERLAP_CAPABILITY else {"OVERLAP": False}


@triton.jit
def await_previous_kernel(OVERLAP: constexpr) -> None:
    """From here on what it has written is there; the kernel behind may begin."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def await_kernel(OVERLAP: constexpr) -> None:
    """The same, but the kernel behind may not begin."""
    if OVERLAP:
        gdc_wait()


@triton.jit
def floats(place: tensor, mask: tensor) -> tensor:
    """Values in float32, 0 outside the mask."""
    return tl.load(place, mask, 0.0).to(tl.float32)


@cache
def num_multiprocessors(device: torch.device) -> int:
    """1 on a CPU, where Triton's interpreter runs one program after the other."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
