"""Products of a single token with 4-bit integers in the library's layout, on `int4_gemv.cu`."""

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.humming import ROWS, HummingMatrices, HummingMatrix, HummingProducts, has_humming
from models.kernels.triton.gemv import Norm
from models.kernels.triton.grouped import TritonGrouped
from models.kernels.triton.launch import num_multiprocessors

GROUPS = (32, 64, 128)


def gemv(
    x_1K: torch.Tensor, matrix: HummingMatrix, out_1N: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False
) -> torch.Tensor:
    """As `models.kernels.triton.gemv.gemv`."""
    norm_weight, eps = norm or (x_1K.new_empty(0), 0.0)
    layer, zeros = matrix.layer, matrix.zeros
    zeros = x_1K.new_empty(0, dtype=torch.int32) if zeros is None else zeros
    kernel, count = load_kernel("int4_gemv", NO_HEADS), num_multiprocessors(x_1K.device)
    kernel.run(x_1K, norm_weight, eps, layer.weight, layer.weight_scale, zeros, out_1N, gated, adds, count)
    return out_1N


class HopperMatrices(HummingMatrices):
    """See `TritonProducts`: our kernel for a single token, the library's for several."""

    gemv = staticmethod(gemv)


class HopperGrouped(HummingProducts):
    """See `HummingProducts`."""

    def __init__(self) -> None:
        super().__init__()
        self._with_gemv = HopperMatrices()

    def library_of(self, matrix: HummingMatrix) -> HummingMatrices:
        return self._with_gemv if takes(matrix) else super().library_of(matrix)


def takes(matrix: HummingMatrix) -> bool:
    """Whether the kernel has its format and both halves of it have whole tiles."""
    return matrix.scheme.bits == 4 and matrix.scheme.group in GROUPS and matrix.shape[0] % (2 * ROWS) == 0


def hopper_grouped() -> TritonGrouped:
    """The fastest that is installed."""
    return HopperGrouped() if has_humming() else TritonGrouped()
