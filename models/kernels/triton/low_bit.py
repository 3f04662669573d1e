"""Products of low-bit matrices: with a vector, with a few tokens, and dequantized for cuBLAS.

Words of a row lie in runs, see `models.weights.layouts.run_of`.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language import constexpr, tensor

from models.kernels.humming import Humming, HummingMatrix, converted
from models.kernels.stream import Activation, Residual, RowClass
from models.kernels.triton.activations import values_of
from models.kernels.triton.gemv import Norm
from models.kernels.triton.launch import await_previous_kernel, cdiv, floats, kernel, num_multiprocessors, power_of_2
from models.kernels.triton.moe import ExpertOperands, weighted_sum
from models.kernels.triton.products import TritonProducts
from models.weights.layouts import WORD, run_of
from models.weights.low_bit import LowBit

VECTOR_WORDS, VECTOR_ROWS, VECTOR_WARPS = 256, 4, 2  # per program of `_gemv`
ROWS, WORDS, WARPS, STAGES = 64, 16, 4, 2  # per program of `_multiply`
LEAST_TOKENS, MOST_TOKENS = 16, 128  # limits of its tile
LEAST_ROWS, LEAST_WORDS = 16, 16  # minimum for one product of tensor cores
SPLITS = 4  # of the inner dimension, for a sum that is added to the residual
DENSE_ROWS, DENSE_WORDS = 8, 64  # per program of `_dequantize`


@triton.jit
def _values(words: tensor, PLACE: constexpr, ELEMENT: constexpr) -> tensor:
    """Return the values of the codes at one place of words, in float32, before zero points are subtracted. Codes of int4 become mantissas
    of 1 + code / 2 ** n, which takes two operations for a pair of places and a shift: see `_factor` and `_offset`."""
    if ELEMENT == "int8":
        value = ((words >> (8 * PLACE)) & 255).to(tl.float32)
    elif ELEMENT == "float8":
        value = ((words >> (8 * PLACE)) & 255).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    elif ELEMENT == "float4":  # a sign, two bits of exponent, one of mantissa
        code = words >> (4 * PLACE)
        power = tl.maximum((code >> 1) & 3, 1)
        whole = tl.where((code & 6) == 0, code & 1, 2 + (code & 1)).to(tl.float32)
        value = whole * ((125 + power) << 23).to(tl.float32, bitcast=True) * tl.where((code & 8) != 0, -1.0, 1.0)
    else:
        if PLACE == 0:
            shifted = words << 16
        elif PLACE <= 2:
            shifted = words << 8
        elif PLACE <= 4:
            shifted = words
        elif PLACE == 5:
            shifted = words >> 4
        else:
            shifted = words >> 12
        MASK: constexpr = 15 << 12 if PLACE == 1 or PLACE == 3 or PLACE == 6 else 15 << 16
        shifted = shifted & MASK
        value = (shifted | 0x3F800000).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _factor(PLACE: constexpr, ELEMENT: constexpr) -> constexpr:
    """Return the factor of `_values`."""
    if ELEMENT != "int4":
        return 1.0
    elif PLACE == 1 or PLACE == 3 or PLACE == 6:
        return 2048.0
    else:
        return 128.0


@triton.jit
def _offset(PLACE: constexpr, ELEMENT: constexpr) -> constexpr:
    """Return the term to subtract from that product."""
    if ELEMENT != "int4":
        return 0.0
    elif PLACE == 1 or PLACE == 3 or PLACE == 6:
        return 2048.0
    else:
        return 128.0


@triton.jit
def _scales_of(
    scales: tensor, zeros: tensor, factors: tensor, row: tensor, group: tensor, inside: tensor, GROUPS: constexpr, MIDDLE: constexpr,
    HAS_ZEROS: constexpr, HAS_FACTORS: constexpr,
) -> tuple[tensor, tensor]:  # fmt: skip
    """Load scales and zero points for the words of rows."""
    place = row.to(tl.int64)[:, None] * GROUPS + group[None, :]
    scale = floats(scales + place, inside)
    if HAS_FACTORS:
        scale *= tl.load(factors + row)[:, None]
    zero = scale * 0 + MIDDLE
    if HAS_ZEROS:
        zero = floats(zeros + place, inside)
    return scale, zero


@kernel()
def _gemv(
    x: tensor, norm_weight: tensor, codes: tensor, scales: tensor, zeros: tensor, factors: tensor, chosen: tensor, out: tensor, eps: tensor,
    OUT: constexpr, WIDTH: constexpr, RUN: constexpr, PER: constexpr, GROUP: constexpr, GROUPS: constexpr, ELEMENT: constexpr,
    MIDDLE: constexpr, HAS_ZEROS: constexpr, HAS_FACTORS: constexpr, NORM: constexpr, GATED: constexpr, ADD: constexpr, CHOICES: constexpr,
    SHARED: constexpr, WHOLE: constexpr, OVERLAP: constexpr, ROWS: constexpr, WORDS: constexpr,
) -> None:  # fmt: skip
    """Program (i, k): ROWS values, of the k-th chosen matrix if there are CHOICES; all of these take the same x if it is SHARED. ROWS
    divides OUT."""
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WORDS)
    await_previous_kernel(OVERLAP)
    first, last = row, WIDTH // PER  # words of a row
    if CHOICES:
        expert = tl.load(chosen + tl.program_id(1))
        last = tl.where(expert >= 0, last, 0)
        first += tl.maximum(expert, 0) * (OUT * 2 if GATED else OUT)
        out += tl.program_id(1) * OUT
        if not SHARED:
            x += tl.program_id(1) * WIDTH
    factor = 1.0
    if NORM:
        every = tl.arange(0, WHOLE)
        stream = floats(x + every, every < WIDTH)
        factor = tl.rsqrt(tl.sum(stream * stream, 0) / WIDTH + eps)
    total, other = tl.zeros((ROWS, WORDS), tl.float32), tl.zeros((ROWS, WORDS), tl.float32)
    for start in tl.range(0, WIDTH // PER, WORDS):
        word = start + lane
        inside = word < last
        column, both = word // RUN * (RUN * PER) + word % RUN, inside[None, :] & (row[:, None] >= 0)
        group = column // GROUP
        at = codes + first.to(tl.int64)[:, None] * (WIDTH // PER) + word[None, :]
        words = tl.load(at, both, 0)
        others = words
        if GATED:
            others = tl.load(at + OUT * (WIDTH // PER), both, 0)
        part, second = tl.zeros((ROWS, WORDS), tl.float32), tl.zeros((ROWS, WORDS), tl.float32)
        plain, base = tl.zeros((WORDS,), tl.float32), tl.zeros((WORDS,), tl.float32)
        for place in tl.static_range(PER):
            value = floats(x + column + place * RUN, inside)
            if NORM:
                value *= floats(norm_weight + column + place * RUN, inside)
            plain += value
            base += value * _offset(place, ELEMENT)
            value *= _factor(place, ELEMENT)
            part += _values(words, place, ELEMENT) * value[None, :]
            if GATED:
                second += _values(others, place, ELEMENT) * value[None, :]
        scale, zero = _scales_of(scales, zeros, factors, first, group, both, GROUPS, MIDDLE, HAS_ZEROS, HAS_FACTORS)
        total += (part - base[None, :] - zero * plain[None, :]) * scale
        if GATED:
            scale, zero = _scales_of(scales, zeros, factors, first + OUT, group, both, GROUPS, MIDDLE, HAS_ZEROS, HAS_FACTORS)
            other += (second - base[None, :] - zero * plain[None, :]) * scale
    result = tl.sum(total, 1) * factor
    if GATED:
        result = result / (1 + tl.exp(-result)) * (tl.sum(other, 1) * factor)
    if ADD:
        result += tl.load(out + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


@kernel(do_not_specialize=["num_tokens"])
def _multiply(
    x: tensor, codes: tensor, scales: tensor, zeros: tensor, factors: tensor, out: tensor, num_tokens: tensor, OUT: constexpr,
    WIDTH: constexpr, RUN: constexpr, PER: constexpr, GROUP: constexpr, GROUPS: constexpr, ELEMENT: constexpr, MIDDLE: constexpr,
    HAS_ZEROS: constexpr, HAS_FACTORS: constexpr, BLOCKS: constexpr, ROWS: constexpr, WORDS: constexpr, TOKENS: constexpr,
    STAGES: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (i, j, t): ROWS values of the t-th TOKENS tokens, over the j-th BLOCKS blocks of WORDS words. Both divide the matrix."""
    row, lane = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, WORDS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    given = token < num_tokens
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    await_previous_kernel(OVERLAP)
    for block in tl.range(0, BLOCKS, num_stages=STAGES):
        word = (tl.program_id(1) * BLOCKS + block) * WORDS + lane
        column = word // RUN * (RUN * PER) + word % RUN
        words = tl.load(codes + row.to(tl.int64)[:, None] * (WIDTH // PER) + word[None, :])
        every = (row[:, None] >= 0) & (word[None, :] >= 0)
        scale, zero = _scales_of(scales, zeros, factors, row, column // GROUP, every, GROUPS, MIDDLE, HAS_ZEROS, HAS_FACTORS)
        for place in tl.static_range(PER):
            value = _values(words, place, ELEMENT) * _factor(place, ELEMENT) - (zero + _offset(place, ELEMENT))
            inputs = tl.load(x + token.to(tl.int64)[None, :] * WIDTH + column[:, None] + place * RUN, given[None, :], 0.0)
            total = tl.dot((value * scale).to(x.dtype.element_ty), inputs, total)
    place = out + (tl.program_id(1) * num_tokens + token[None, :]).to(tl.int64) * OUT + row[:, None]
    tl.store(place, total.to(out.dtype.element_ty), given[None, :])


@kernel()
def _dequantize(
    codes: tensor, scales: tensor, zeros: tensor, factors: tensor, out: tensor, WIDTH: constexpr, RUN: constexpr, PER: constexpr,
    GROUP: constexpr, GROUPS: constexpr, ELEMENT: constexpr, MIDDLE: constexpr, HAS_ZEROS: constexpr, HAS_FACTORS: constexpr,
    ROWS: constexpr, WORDS: constexpr, OVERLAP: constexpr,
) -> None:  # fmt: skip
    """Program (i, j): the j-th WORDS words of ROWS rows, as values."""
    row, word = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    inside = (row[:, None] >= 0) & (word < WIDTH // PER)[None, :]
    words = tl.load(codes + row.to(tl.int64)[:, None] * (WIDTH // PER) + word[None, :], inside, 0)
    await_previous_kernel(OVERLAP)
    column = word // RUN * (RUN * PER) + word % RUN
    scale, zero = _scales_of(scales, zeros, factors, row, column // GROUP, inside, GROUPS, MIDDLE, HAS_ZEROS, HAS_FACTORS)
    for place in tl.static_range(PER):
        value = (_values(words, place, ELEMENT) * _factor(place, ELEMENT) - (zero + _offset(place, ELEMENT))) * scale
        at = out + row.to(tl.int64)[:, None] * WIDTH + column[None, :] + place * RUN
        tl.store(at, value.to(out.dtype.element_ty), inside)


def _settings(matrix: LowBit) -> dict[str, object]:
    """Return the constants that all kernels take."""
    groups, run = matrix.scales.shape[1], run_of(matrix.scheme, matrix.shape[1])
    return {
        "WIDTH": matrix.shape[1], "RUN": run, "PER": WORD // matrix.scheme.bits, "GROUP": matrix.shape[1] // groups, "GROUPS": groups,
        "ELEMENT": matrix.scheme.element, "MIDDLE": matrix.middle, "HAS_ZEROS": matrix.zeros is not None,
        "HAS_FACTORS": matrix.factors is not None,
    }  # fmt: skip


def _tensors(matrix: LowBit) -> tuple[torch.Tensor, ...]:
    assert matrix.codes.is_contiguous() and matrix.scales.is_contiguous()
    spare = matrix.scales
    zeros, factors = spare if matrix.zeros is None else matrix.zeros, spare if matrix.factors is None else matrix.factors
    return matrix.codes, matrix.scales, zeros, factors


def gemv(
    x_KX: torch.Tensor, matrix: LowBit, out_KN: torch.Tensor, norm: Norm | None = None, gated: bool = False, adds: bool = False,
    chosen_K: torch.Tensor | None = None, num_matrices: int = 1,
) -> torch.Tensor:  # fmt: skip
    """Like `models.kernels.triton.gemv.gemv`. With `chosen_K`, multiply by these of `num_matrices` stacked matrices; x is one vector,
    or one per choice."""
    norm_weight, eps = norm or (x_KX, 0.0)
    num_out, choices = matrix.shape[0] // num_matrices // (1 + gated), 0 if chosen_K is None else len(chosen_K)
    rows = math.gcd(num_out, VECTOR_ROWS)
    while rows > 1 and num_out // rows * max(1, choices) < 4 * num_multiprocessors(x_KX.device):
        rows //= 2
    _gemv[(num_out // rows, max(1, choices))](
        x_KX, norm_weight, *_tensors(matrix), matrix.codes if chosen_K is None else chosen_K, out_KN, eps,
        OUT=num_out, **_settings(matrix), NORM=norm is not None, GATED=gated, ADD=adds, CHOICES=choices, SHARED=len(x_KX) == 1,
        WHOLE=power_of_2(matrix.shape[1]) if norm is not None else 1, ROWS=rows, WORDS=VECTOR_WORDS, num_warps=VECTOR_WARPS,
    )  # fmt: skip
    return out_KN


def has_tiles(matrix: LowBit) -> bool:
    """Return whether `multiply` takes the matrix."""
    return matrix.shape[0] % LEAST_ROWS == 0 and matrix.codes.shape[1] % LEAST_WORDS == 0


def multiply(x_TX: torch.Tensor, matrix: LowBit, out_STN: torch.Tensor) -> None:
    """Write S split-K partial sums of x @ matrix.T to `out_STN`, (S, T, N)."""
    num_tokens, num_words = len(x_TX), matrix.codes.shape[1]
    tokens = max(LEAST_TOKENS, min(MOST_TOKENS, power_of_2(num_tokens)))
    rows, words = math.gcd(matrix.shape[0], ROWS), math.gcd(num_words // len(out_STN), WORDS)
    assert rows >= LEAST_ROWS and words >= LEAST_WORDS, f"a tile of {rows} x {words} words is too small for a product"
    _multiply[(matrix.shape[0] // rows, len(out_STN), cdiv(num_tokens, tokens))](
        x_TX, *_tensors(matrix), out_STN, num_tokens, OUT=matrix.shape[0], **_settings(matrix),
        BLOCKS=num_words // words // len(out_STN), ROWS=rows, WORDS=words, TOKENS=tokens, STAGES=STAGES, num_warps=WARPS,
    )  # fmt: skip


def dequantize(matrix: LowBit, dtype: torch.dtype) -> torch.Tensor:
    """Return the values, (N, K)."""
    out_NK, rows = torch.empty(matrix.shape, dtype=dtype, device=matrix.codes.device), math.gcd(matrix.shape[0], DENSE_ROWS)
    _dequantize[(matrix.shape[0] // rows, cdiv(matrix.codes.shape[1], DENSE_WORDS))](
        *_tensors(matrix), out_NK, **_settings(matrix), ROWS=rows, WORDS=DENSE_WORDS, num_warps=8
    )
    return out_NK


class TritonLowBit(TritonProducts[LowBit]):
    """See `TritonProducts`. Few tokens use our kernel, which reads the words once. More tokens, a matrix without whole tiles and experts
    use dequantized values in scratch memory."""

    max_chosen = 1 << 30

    def finished(self) -> TritonProducts[Any]:
        matrix = converted(self.matrix, self.count)
        return self if matrix is None else self.by_library(matrix)

    def by_library(self, matrix: HummingMatrix) -> Humming:
        return Humming(matrix, self.count)

    def gemv(self, x_1X: torch.Tensor, out_1N: torch.Tensor, norm: Norm | None, gated: bool = False, adds: bool = False) -> torch.Tensor:
        return gemv(x_1X, self.matrix, out_1N, norm, gated, adds)

    def product_of_many(self, x_TX: Activation, rows: RowClass, out_TN: torch.Tensor | None) -> torch.Tensor:
        x_TX, matrix = values_of(x_TX), self.matrix
        if rows > RowClass.SOME or not has_tiles(matrix):
            return torch.mm(x_TX, dequantize(matrix, x_TX.dtype).t(), out=out_TN)
        out_TN = x_TX.new_empty((len(x_TX), matrix.shape[0])) if out_TN is None else out_TN
        multiply(x_TX, matrix, out_TN[None])
        return out_TN

    def add_many_to(self, residual: Residual, x_TX: Activation, rows: RowClass) -> None:
        x_TX, matrix = values_of(x_TX), self.matrix
        if rows > RowClass.SOME or not has_tiles(matrix):
            residual.sum_TD.addmm_(x_TX, dequantize(matrix, x_TX.dtype).t())
            return
        splits = math.gcd(SPLITS, matrix.codes.shape[1] // LEAST_WORDS)
        parts_STD = residual.room(splits, len(x_TX), matrix.shape[0], dtype=torch.float32)
        multiply(x_TX, matrix, parts_STD)
        residual.add_(parts_STD)

    def product_f32(self, x_TX: torch.Tensor, rows: RowClass, out_TN: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(x_TX, dequantize(self.matrix, x_TX.dtype).t(), out_dtype=torch.float32, out=out_TN)

    def expert_swiglu(self, x_1D: torch.Tensor, chosen_K: torch.Tensor) -> torch.Tensor:
        inner_KI = x_1D.new_empty((len(chosen_K), self.width // self.count // 2))
        return gemv(x_1D, self.matrix, inner_KI, gated=True, chosen_K=chosen_K, num_matrices=self.count)

    def expert_sum(self, inner_KI: torch.Tensor, chosen_K: torch.Tensor, weights_K: torch.Tensor, out_1D: torch.Tensor, adds: bool) -> None:
        parts_KD = inner_KI.new_empty((len(chosen_K), out_1D.shape[1]))
        gemv(inner_KI, self.matrix, parts_KD, chosen_K=chosen_K, num_matrices=self.count)
        weighted_sum(parts_KD, chosen_K[None], weights_K[None], out_1D, adds)

    def expert_operands(self, x_TX: torch.Tensor) -> ExpertOperands:
        values = dequantize(self.matrix, x_TX.dtype)
        return ExpertOperands(x_TX, x_TX, values, values)
