"""Products of a single token with 4-bit integers in the library's layout, on `int4_gemv.cu`."""

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.humming import Humming
from models.kernels.triton.gemv import Norm
from models.kernels.triton.moe import weighted_sum
from models.weights.low_bit import LowBit

GROUPS = (32, 64, 128)
ROWS, COLUMNS = 64, 128  # of a tile


class HopperInt4(Humming):
    """See `TritonProducts`: our kernel for a single token, the library's for several."""

    has_gemv = True
    max_chosen = 1 << 30

    def gemv(
        self, x_1X: torch.Tensor, out: torch.Tensor, norm: Norm | None, gated: bool = False, adds: bool = False,
        chosen_K: torch.Tensor | None = None, is_chosen_early: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """See `TritonProducts`; with `chosen_K` (int32), by the matrix of each of these experts, where -1 leaves the result undefined, of
        one x or of one for each. `is_chosen_early`: the previous kernel has not written them."""
        (norm_weight, eps), kernel, tensors = norm or (None, 0.0), load_kernel("int4_gemv", NO_HEADS), self.matrix.tensors
        weight, scales, zeros = tensors["weight"], tensors["weight_scale"].flatten(0, -2), tensors.get("zero_point")
        groups = len(scales) // self.count
        kernel.run(x_1X, norm_weight, eps, weight, scales, groups, zeros, chosen_K, is_chosen_early, out, gated, adds)
        return out

    def expert_swiglu(self, x_1D: torch.Tensor, chosen_K: torch.Tensor) -> torch.Tensor:
        return self.gemv(x_1D, x_1D.new_empty((len(chosen_K), self.width // self.count // 2)), None, gated=True, chosen_K=chosen_K)

    def expert_sum(self, inner_KI: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool) -> None:
        parts_KD = inner_KI.new_empty((len(chosen_K), out_1D.shape[1]))
        self.gemv(inner_KI, parts_KD, None, chosen_K=chosen_K, is_chosen_early=True)
        weighted_sum(parts_KD, chosen_K[None], weights_K[None], out_1D, adds)


def low_bit_products(matrix: LowBit, count: int) -> Humming:
    """Return the products of a low-bit matrix, with our kernel if that has its format and both halves of it have whole tiles."""
    (rows, columns), scheme = matrix.shape, matrix.scheme
    fits = scheme.element == "int4" and scheme.group in GROUPS and rows // count % (2 * ROWS) == 0 and columns % COLUMNS == 0
    return (HopperInt4 if fits else Humming)(matrix, count)
