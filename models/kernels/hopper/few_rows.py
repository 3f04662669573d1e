"""Products of few tokens with matrices in bfloat16 on `few_rows.cu`."""

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.launch import num_multiprocessors
from models.kernels.triton.plain import TritonPlain
from models.weights.plain import Plain

LEAST_ROWS = 1024  # cuBLAS is faster with fewer, which occupy few multiprocessors
ROWS, COLUMNS = 16, 64  # the kernel multiplies multiples of these


def multiply(x_TK: torch.Tensor, weight_NK: torch.Tensor, out_TN: torch.Tensor, gated: bool = False, adds: bool = False) -> torch.Tensor:
    """Write or add x @ weight.T to `out_TN`; if `gated`, silu(g) * u of its halves g and u."""
    load_kernel("few_rows", NO_HEADS).run(x_TK, weight_NK, out_TN, gated, adds, num_multiprocessors(x_TK.device))
    return out_TN


def takes(matrix: Plain, rows: RowClass) -> bool:
    """Return whether the kernel supports the matrix and is the fastest for so many tokens."""
    num_rows, width = matrix.shape
    return rows <= RowClass.HANDFUL and num_rows >= LEAST_ROWS and num_rows % ROWS == 0 and width % COLUMNS == 0


class HopperPlain(TritonPlain):
    """See `TritonPlain`."""

    def product_of_many(self, x_TX: Activation, matrix: Plain, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        if not takes(matrix, rows):
            return super().product_of_many(x_TX, matrix, rows, out_TN)
        x_TX = values_of(x_TX)
        return multiply(x_TX, matrix.values, x_TX.new_empty((len(x_TX), len(matrix.values))) if out_TN is None else out_TN)

    def swiglu_of_many(self, x_TX: Activation, matrix: Plain, rows: RowClass) -> torch.Tensor | Rounded:
        if not takes(matrix, rows):
            return super().swiglu_of_many(x_TX, matrix, rows)
        x_TX = values_of(x_TX)
        return multiply(x_TX, matrix.values, x_TX.new_empty((len(x_TX), len(matrix.values) // 2)), gated=True)

    def add_many_to(self, residual: Residual, x_TX: Activation, matrix: Plain, rows: RowClass) -> None:
        if takes(matrix, rows):
            multiply(values_of(x_TX), matrix.values, residual.sum_TD, adds=True)
        else:
            super().add_many_to(residual, x_TX, matrix, rows)

    def product_f32(self, x_TX: torch.Tensor, matrix: Plain, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        if rows == RowClass.SINGLE or not takes(matrix, rows):
            return super().product_f32(x_TX, matrix, rows, out_TN)
        shape = len(x_TX), len(matrix.values)
        return multiply(x_TX, matrix.values, x_TX.new_empty(shape, dtype=torch.float32) if out_TN is None else out_TN)
