"""Products of up to RowClass.FEW tokens on `few_rows.cu`, with matrices in bfloat16 or float8."""

import math

import torch

from models.kernels.hopper.compile import NO_HEADS, load_kernel
from models.kernels.stream import Activation, Residual, Rounded, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.ops import TritonOps
from models.kernels.triton.plain import TritonPlain
from models.weights.float8 import BlockScaled, GroupScaled
from models.weights.plain import Plain

PARTS = 2  # split-K partial sums of a product that is added to the residual
ROUTER_PARTS = 8  # of a mixture's router
LEAST_ROWS = 1024  # cuBLAS is faster with fewer, which occupy few multiprocessors
ROWS, CHUNK = 16, 128  # the kernel multiplies multiples of so many rows and bytes of columns


def multiply(x_TK: torch.Tensor | GroupScaled, weight_NK: Plain | BlockScaled, out: torch.Tensor, gated: bool = False) -> torch.Tensor:
    """Write x @ weight.T to `out` (T, N), or split-K partial sums to (S, T, N), and return it; if `gated`, write silu(g) * u
    instead, of the product's halves g and u. `out` has float32 or bfloat16."""
    kernel, out_STN = load_kernel("few_rows", NO_HEADS), out.view(-1, *out.shape[-2:])
    if isinstance(x_TK, torch.Tensor):
        kernel.run(x_TK, None, weight_NK.values, None, out_STN, gated)
    else:
        assert isinstance(weight_NK, BlockScaled)
        x, weight = x_TK.padded.view(torch.uint8), weight_NK.values.view(torch.uint8)
        kernel.run(x, x_TK.scales, weight, weight_NK.padded_scales, out_STN, gated)
    return out


def add(residual: Residual, x_TK: torch.Tensor | GroupScaled, weight_NK: Plain | BlockScaled) -> None:
    """Add x @ weight.T to the residual."""
    num_rows, width = weight_NK.shape
    num_parts = math.gcd(PARTS, width * weight_NK.values.itemsize // CHUNK)
    residual.add_(multiply(x_TK, weight_NK, residual.room(num_parts, len(x_TK), num_rows, dtype=torch.float32)))


class HopperOps(TritonOps):
    """See `TritonOps`."""

    def _logits(self, x_TD: torch.Tensor, router_ED: torch.Tensor, rows: RowClass) -> torch.Tensor:
        (num_experts, width), num_tokens = router_ED.shape, len(x_TD)
        num_chunks, rest = divmod(width * x_TD.itemsize, CHUNK)
        if rows > RowClass.FEW or num_experts % ROWS or rest:
            return super()._logits(x_TD, router_ED, rows)
        out_STE = x_TD.new_empty((math.gcd(ROUTER_PARTS, num_chunks), num_tokens, num_experts), dtype=torch.float32)
        return multiply(x_TD, Plain(router_ED), out_STE)


class HopperPlain(TritonPlain):
    """See `TritonPlain`."""

    def __init__(self, matrix: Plain, count: int = 1) -> None:
        super().__init__(matrix, count)
        num_rows, width = matrix.shape
        is_fast = num_rows >= LEAST_ROWS and num_rows % ROWS == 0 and width * matrix.values.itemsize % CHUNK == 0
        self._most_rows = RowClass.FEW if is_fast else 0

    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        if rows > self._most_rows:
            return super().product_of_many(x_TX, rows, out_TN)
        x_TX = values_of(x_TX, True)
        return multiply(x_TX, self.matrix, x_TX.new_empty((len(x_TX), self.width)) if out_TN is None else out_TN)

    def swiglu_of_many(self, x_TX: Activation, rows: RowClass) -> torch.Tensor | Rounded:
        if rows > self._most_rows:
            return super().swiglu_of_many(x_TX, rows)
        x_TX = values_of(x_TX, True)
        return multiply(x_TX, self.matrix, x_TX.new_empty((len(x_TX), self.width // 2)), gated=True)

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        if rows > self._most_rows:
            super().add_many_to(residual, x_TX, rows)
        else:
            add(residual, values_of(x_TX), self.matrix)

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        if rows == RowClass.SINGLE or rows > self._most_rows:
            return super().product_f32(x_TX, rows, out_TN)
        out_TN = x_TX.new_empty((len(x_TX), self.width), dtype=torch.float32) if out_TN is None else out_TN
        return multiply(x_TX, self.matrix, out_TN)
