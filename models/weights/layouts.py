"""Layouts of the tensors of a `Scheme` in checkpoints (AutoAWQ's `WQLinear_GEMM`, AutoGPTQ's `QuantLinear`, compressed-tensors, ModelOpt),
and the layout after loading."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

WORD = 32  # bits
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # column i of eight is value AWQ_ORDER[i] of the word


@dataclass(frozen=True, slots=True)
class Layout:
    """Suffixes of tensors and their packing: words of consecutive values of a row ("columns") or of consecutive rows ("rows"), bytes of two
    values of a row ("pairs"), or single values."""

    codes: str
    scales: str
    packing: Literal["columns", "rows", "pairs", "values"]
    zeros: str = ""  # packed by rows
    factors: str = ""  # one factor of the whole matrix for all scales
    is_transposed: bool = False
    order: tuple[int, ...] = ()  # order of values that are packed by rows
    zero_offset: int = 0  # zero point minus its code
    divides: bool = False  # scales are divided by the factor
    scalar_shape: tuple[int, ...] | None = None  # shape of factors, or of the only scale of a matrix

    def block(self, bits: int) -> tuple[int, int]:
        """Return the rows and columns of values in an element of `codes`."""
        per_word = WORD // bits
        return {"columns": (1, per_word), "rows": (per_word, 1), "pairs": (1, 2), "values": (1, 1)}[self.packing]


FINAL = "final"
LAYOUTS: Mapping[str, Layout] = {
    FINAL: Layout(".codes", ".scales", "columns", ".zeros", ".factors"),
    "packed": Layout(".weight_packed", ".weight_scale", "columns", ".weight_zero_point"),
    "awq": Layout(".qweight", ".scales", "rows", ".qzeros", is_transposed=True, order=AWQ_ORDER),
    "gptq": Layout(".qweight", ".scales", "columns", ".qzeros", is_transposed=True, zero_offset=1),
    "gptq_v2": Layout(".qweight", ".scales", "columns", ".qzeros", is_transposed=True),
    "float8": Layout(".weight", ".weight_scale", "values"),
    "float8_tensor": Layout(".weight", ".weight_scale", "values", scalar_shape=(1,)),
    "float8_scalar": Layout(".weight", ".weight_scale", "values", scalar_shape=()),
    "nvfp4": Layout(".weight_packed", ".weight_scale", "pairs", factors=".weight_global_scale", divides=True, scalar_shape=(1,)),
    "modelopt_fp4": Layout(".weight", ".weight_scale", "pairs", factors=".weight_scale_2", scalar_shape=()),
}


def unpacked_columns(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack words (N, K / P) of P consecutive values to (N, K) uint8."""
    return _shifted(words[:, :, None], bits).flatten(1)


def unpacked_rows(tensor: torch.Tensor, bits: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Unpack words (N / P, X) of P consecutive rows to (N, X) uint8."""
    values = _shifted(tensor[:, :, None], bits).transpose(1, 2)
    return (values[:, list(order)] if order else values).flatten(0, 1)


def _shifted(words: torch.Tensor, bits: int) -> torch.Tensor:
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    return ((words >> shifts) & ((1 << bits) - 1)).to(torch.uint8)


def packed_columns(codes_NK: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (N, K) uint8 to words (N, K / P) of consecutive values, the first in the lowest bits."""
    values = codes_NK.unflatten(1, (-1, WORD // bits))
    words = torch.zeros_like(values[:, :, 0], dtype=torch.int32)
    for place in range(WORD // bits):
        words |= values[:, :, place].to(torch.int32) << place * bits
    return words


def packed_rows(codes_NX: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (N, X) uint8 to words (N / P, X) of consecutive rows."""
    return packed_columns(codes_NX.t(), bits).t().contiguous()
