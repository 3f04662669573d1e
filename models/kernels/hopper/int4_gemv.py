"""Products of a single token with 4-bit integers in the library's layout, on `int4_gemv.cu`."""

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.humming import ROWS, HummingMatrices, HummingMatrix, HummingProducts, has_humming
from models.kernels.ops import Experts
from models.kernels.triton.gemv import Norm
from models.kernels.triton.grouped import TritonGrouped
from models.kernels.triton.launch import num_multiprocessors
from models.kernels.triton.moe import weighted_sum
from models.kernels.triton.products import ExpertGemv

GROUPS = (32, 64, 128)


def _run(
    x_KX: torch.Tensor, matrix: HummingMatrix, out_KN: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False,
    chosen_K: torch.Tensor | None = None, is_chosen_early: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Multiply by the matrix, or by each of several `chosen_K` (int32), of which -1 leaves the result undefined. `is_chosen_early`: the
    previous kernel has not written them."""
    norm_weight, eps = norm or (x_KX.new_empty(0), 0.0)
    layer, zeros, no_ints = matrix.layer, matrix.zeros, x_KX.new_empty(0, dtype=torch.int32)
    zeros, chosen = no_ints if zeros is None else zeros, no_ints if chosen_K is None else chosen_K
    kernel, count = load_kernel("int4_gemv", NO_HEADS), num_multiprocessors(x_KX.device)
    scales = layer.weight_scale.flatten(0, -2)
    groups = len(scales) // matrix.count
    kernel.run(
        x_KX, norm_weight, eps, layer.weight, scales, groups, zeros, chosen, is_chosen_early, out_KN, gated, adds, count
    )  # fmt: skip
    return out_KN


def gemv(
    x_1K: torch.Tensor, matrix: HummingMatrix, out_1N: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False
) -> torch.Tensor:
    """As `models.kernels.triton.gemv.gemv`."""
    return _run(x_1K, matrix, out_1N, norm, gated, adds)


class HopperExperts:
    """See `ExpertGemv`."""

    @staticmethod
    def expert_swiglu(x_1D: torch.Tensor, gate_up: HummingMatrix, chosen_K: torch.Tensor, num_experts: int) -> torch.Tensor:
        inner_KI = x_1D.new_empty((len(chosen_K), gate_up.shape[0] // num_experts // 2))
        return _run(x_1D, gate_up, inner_KI, gated=True, chosen_K=chosen_K)

    @staticmethod
    def expert_sum(
        inner_KI: torch.Tensor, down: HummingMatrix, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool
    ) -> None:
        parts_KD = _run(inner_KI, down, inner_KI.new_empty((len(chosen_K), out_1D.shape[1])), chosen_K=chosen_K, is_chosen_early=True)
        weighted_sum(parts_KD, chosen_K[None], weights_K[None], out_1D, adds)


class HopperMatrices(HummingMatrices):
    """See `TritonProducts`: our kernel for a single token, the library's for several."""

    gemv = staticmethod(gemv)

    def expert_gemv(self, experts: Experts) -> ExpertGemv:
        return HopperExperts()


class HopperGrouped(HummingProducts):
    """See `HummingProducts`."""

    def __init__(self) -> None:
        super().__init__()
        self._with_gemv = HopperMatrices()

    def library_of(self, matrix: HummingMatrix) -> HummingMatrices:
        return self._with_gemv if takes(matrix) else super().library_of(matrix)


def takes(matrix: HummingMatrix) -> bool:
    """Whether the kernel has its format and both halves of it have whole tiles."""
    return matrix.scheme.bits == 4 and matrix.scheme.group in GROUPS and matrix.shape[0] // matrix.count % (2 * ROWS) == 0


def hopper_grouped() -> TritonGrouped:
    """The fastest that is installed."""
    return HopperGrouped() if has_humming() else TritonGrouped()
