"""Products of float8 matrices in scaled blocks, of inputs that are rounded likewise."""

import torch

from models.kernels.stream import Activation, Residual, RowClass
from models.kernels.triton.activations import rounded
from models.kernels.triton.fp8 import multiply, multiply_in_parts
from models.kernels.triton.products import ExpertOperands, TritonProducts
from models.kernels.triton.text import quantized, swiglu_quantized
from models.kernels.triton.tuned import ExpertTiles, expert_tiles
from models.weights.float8 import BlockScaled, GroupScaled


class TritonFloat8(TritonProducts[BlockScaled]):
    """See `TritonProducts`. Products of few tokens that join the residual are cut along the inner dimension."""

    def multiply(self, x_TX: GroupScaled, matrix: BlockScaled, rows: RowClass) -> torch.Tensor:
        """x @ matrix.T in bfloat16, for any number of tokens."""
        return multiply(x_TX, matrix)

    def product_of_many(self, x_TX: Activation, matrix: BlockScaled, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        y_TN = self.multiply(rounded(x_TX), matrix, rows)
        return y_TN if out_TN is None else out_TN.copy_(y_TN)

    def activated(self, gate_up_TN: torch.Tensor) -> GroupScaled:
        return swiglu_quantized(gate_up_TN)

    def add_many_to(self, residual: Residual, x_TX: Activation, matrix: BlockScaled, rows: RowClass) -> None:
        x_TX = rounded(x_TX)
        is_cut = rows <= RowClass.SOME
        residual.add_(multiply_in_parts(x_TX, matrix) if is_cut else self.multiply(x_TX, matrix, rows)[None])

    def product_f32(self, x_TX: torch.Tensor, matrix: BlockScaled, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        assert out_TN is None
        return multiply(quantized(x_TX), matrix, torch.float32)

    def expert_tiles(self, num_tokens: int, capability: tuple[int, int]) -> ExpertTiles:
        return expert_tiles(num_tokens, True, capability)

    def expert_operands(self, x_TX: torch.Tensor, matrices: BlockScaled) -> ExpertOperands:
        x, scales = quantized(x_TX), matrices.padded_scales
        return ExpertOperands(x.padded, x.scales, matrices.values, scales, scales.shape[1], len(x.padded))
