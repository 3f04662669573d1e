"""Products of few tokens with matrices in bfloat16 on `few_rows.cu`."""

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.plain import TritonPlain
from models.weights.plain import Plain

LEAST_ROWS = 1024  # cuBLAS is faster with fewer, which occupy few multiprocessors
ROWS, COLUMNS = 16, 64  # the kernel multiplies multiples of these


def multiply(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor, gated: bool = False, adds: bool = False) -> torch.Tensor:
    """Write or add x @ weight.T to `out_TN`; if `gated`, silu(g) * u of its halves g and u."""
    load_kernel("few_rows", NO_HEADS).run(x_TK, weight_NK, out_TN, gated, adds)
    return out_TN


class HopperPlain(TritonPlain):
    """See `TritonPlain`. The kernel multiplies up to RowClass.HANDFUL tokens if it is the fastest for the matrix."""

    def __init__(self, matrix: Plain, count: int = 1) -> None:
        super().__init__(matrix, count)
        num_rows, width = matrix.shape
        is_fast = num_rows >= LEAST_ROWS and num_rows % ROWS == 0 and width % COLUMNS == 0
        self._most_rows = RowClass.HANDFUL if is_fast else 0

    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        if rows > self._most_rows:
            return super().product_of_many(x_TX, rows, out_TN)
        x_TX = values_of(x_TX)
        return multiply(x_TX, self.matrix.values, x_TX.new_empty((len(x_TX), self.width)) if out_TN is None else out_TN)

    def swiglu_of_many(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        if rows > self._most_rows:
            return super().swiglu_of_many(x_TX, rows)
        x_TX = values_of(x_TX)
        return multiply(x_TX, self.matrix.values, x_TX.new_empty((len(x_TX), self.width // 2)), gated=True)

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if rows > self._most_rows:
            super().add_many_to(residual, x_TX, rows)
        else:
            multiply(values_of(x_TX), self.matrix.values, residual.sum_TD, adds=True)

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        if rows == RowClass.SINGLE or rows > self._most_rows:
            return super().product_f32(x_TX, rows, out_TN)
        out_TN = x_TX.new_empty((len(x_TX), self.width), dtype=torch.float32) if out_TN is None else out_TN
        return multiply(x_TX, self.matrix.values, out_TN)
