"""Products of block-scaled float8 matrices with inputs quantized alike."""

import math

import torch
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.stream import Activation, Residual, RowClass
from models.kernels.triton.activations import rounded
from models.kernels.triton.launch import await_previous_kernel, cdiv, kernel, power_of_2
from models.kernels.triton.moe import Room
from models.kernels.triton.products import TritonProducts
from models.kernels.triton.text import quantized, swiglu_quantized
from models.weights.float8 import BLOCK, BlockScaled, GroupScaled

ROWS, STAGES = 64, 4  # matrix rows per program
LEAST_TOKENS, MOST_TOKENS = 16, 128  # tokens of a program's tile
SPLITS, WARPS = 4, 4


@kernel(do_not_specialize=["num_tokens", "scale_stride"])
def _multiply(
    x: tensor, x_scales: tensor, weight: tensor, weight_scales: tensor, out: tensor, num_tokens: tensor, scale_stride: tensor,
    OUT: constexpr, WIDTH: constexpr, PADDED: constexpr, BLOCKS: constexpr, ROWS: constexpr, TOKENS: constexpr, STAGES: constexpr,
    OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (i, j, t): ROWS values of the t-th TOKENS tokens, over the j-th BLOCKS blocks of 128 inputs."""
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, 128)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * BLOCKS
    weights = weight + row.to(tl.int64)[:, None] * WIDTH + first * 128 + column[None, :]
    inputs = x + token[None, :] * WIDTH + first * 128 + column[:, None]
    inside = token < num_tokens
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    await_previous_kernel(OVERLAP)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        products = tl.dot(tl.load(weights + block * 128), tl.load(inputs + block * 128, inside[None, :], 0.0))
        input_scales = tl.load(x_scales + (first + block) * scale_stride + token, inside, 0.0)
        total += products * (input_scales * tl.load(weight_scales + tl.program_id(0) * ROWS // 128 * PADDED + first + block))[None, :]
    place = out + (tl.program_id(1) * num_tokens + token[None, :]) * OUT + row[:, None]
    tl.store(place, total.to(out.dtype.element_ty), inside[None, :])


def multiply(
    x_TK: GroupScaled, weight_NK: BlockScaled, dtype: torch.dtype = torch.bfloat16, out_TN: torch.Tensor | None = None
) -> torch.Tensor:
    """Return x @ weight.T for at least one token, in `out_TN` if given."""
    out_TN = x_TK.padded.new_empty((len(x_TK), len(weight_NK)), dtype=dtype) if out_TN is None else out_TN
    _launch(x_TK, weight_NK, out_TN[None])
    return out_TN


def multiply_in_parts(x_TK: GroupScaled, weight_NK: BlockScaled, room: Room) -> torch.Tensor:
    """Return (S, T, N) float32 split-K partial sums of the product."""
    num_parts = math.gcd(SPLITS, x_TK.padded.shape[1] // BLOCK)
    parts_STN = room(num_parts, len(x_TK), len(weight_NK), dtype=torch.float32)
    _launch(x_TK, weight_NK, parts_STN)
    return parts_STN


def _launch(x_TK: GroupScaled, weight_NK: BlockScaled, out_STN: torch.Tensor) -> None:
    num_parts, num_tokens, rows = out_STN.shape
    assert num_tokens and rows % ROWS == 0
    tokens = min(MOST_TOKENS, max(LEAST_TOKENS, power_of_2(num_tokens)))
    scales = weight_NK.padded_scales
    _multiply[(rows // ROWS, num_parts, cdiv(num_tokens, tokens))](
        x_TK.padded, x_TK.scales, weight_NK.values, scales, out_STN, num_tokens, len(x_TK.padded),
        OUT=rows, WIDTH=x_TK.padded.shape[1], PADDED=scales.shape[1], BLOCKS=x_TK.padded.shape[1] // BLOCK // num_parts,
        ROWS=ROWS, TOKENS=tokens, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


class TritonFloat8(TritonProducts[BlockScaled]):
    """See `TritonProducts`. Products of few tokens that are added to the residual use split-K."""

    has_gemv = False

    def is_early(self, rows: RowClass) -> bool:
        """Return whether a product reads the matrix before it waits for the kernel that rounds its input."""
        return False

    def multiply(self, x_TX: GroupScaled, rows: RowClass, room_PN: torch.Tensor | None = None) -> torch.Tensor:
        """Return x @ matrix.T in bfloat16 for any number of tokens, in memory for `x.padded` if given."""
        return multiply(x_TX, self.matrix, out_TN=None if room_PN is None else room_PN[: len(x_TX)])

    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        y_TN = self.multiply(rounded(x_TX, self.is_early(rows)), rows)
        return y_TN if out_TN is None else out_TN.copy_(y_TN)

    def swiglu_of_many(self, x_TX: Activation, rows: RowClass) -> GroupScaled:
        return swiglu_quantized(self.product_of_many(x_TX, rows, None), self.is_early(rows))

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        x_TX = rounded(x_TX)
        if rows <= RowClass.SOME:
            residual.add_(multiply_in_parts(x_TX, self.matrix, residual.room))
        else:
            residual.add_(self.multiply(x_TX, rows, residual.room(1, len(x_TX.padded), self.width)[0])[None])

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        assert out_TN is None
        return multiply(quantized(x_TX), self.matrix, torch.float32)
