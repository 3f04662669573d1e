"""Low-bit matrices with scales for groups of values, of AWQ, GPTQ, compressed-tensors and ModelOpt: see `Scheme`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.config.formats import Format
from models.config.schemes import NVFP4_GROUP, Scheme
from models.kernels.reference.products import TorchProducts
from models.weights.layouts import FINAL, LAYOUTS, WORD, Layout, packed_columns, packed_rows, unpacked_columns, unpacked_rows
from models.weights.matrix import WHOLE, Stored

STRIPE = 1 << 12  # rows converted at a time
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of e2m1


@dataclass(frozen=True)
class LowBit:
    """See `Storage`: value = (code - zero point) * scale * factor.

    codes: in the final layout int32 (N, K / P). scales: (N, K / group). zeros: int32 (N / P, K / group), or None. factors: float32 (N, 1),
    or None. Other layouts: as `layout` says, or transposed if it is.
    """

    scheme: Scheme
    shape: torch.Size
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    factors: torch.Tensor | None

    @property
    def layout(self) -> Layout:
        return LAYOUTS[self.scheme.layout]

    @property
    def middle(self) -> int:
        """Return the zero point of symmetric integers; 0 for floats."""
        return 1 << (self.scheme.bits - 1) if self.scheme.element.startswith("int") else 0

    @property
    def stored(self) -> tuple[Stored, ...]:
        layout, group = self.layout, self.scheme.group or WHOLE
        is_transposed = layout.is_transposed
        tensors = [
            Stored(layout.codes, self.codes, layout.block(self.scheme.bits), is_transposed),
            Stored(layout.scales, self.scales, (1, group), is_transposed, None if layout.factors else layout.scalar_shape),
        ]
        if self.zeros is not None:
            tensors.append(Stored(layout.zeros, self.zeros, (WORD // self.scheme.bits, group), is_transposed))
        if self.factors is not None:
            tensors.append(Stored(layout.factors, self.factors, (1, WHOLE), is_transposed, layout.scalar_shape))
        return tuple(tensors)

    def rows(self, first: int, last: int) -> "LowBit":
        def cut(tensor: torch.Tensor | None) -> torch.Tensor | None:
            height = 1 if tensor is None else self.shape[0] // len(tensor)
            return None if tensor is None else tensor[first // height : last // height]

        codes, scales = cut(self.codes), cut(self.scales)
        assert codes is not None and scales is not None
        return LowBit(self.scheme, torch.Size((last - first, self.shape[1])), codes, scales, cut(self.zeros), cut(self.factors))

    def fill_normal_(self, std: float, generator: torch.Generator) -> None:
        """Fill with uniform codes, which need as much time as normal ones; float8 gets no NaN."""
        device = self.codes.device
        for stripe in self.codes.split(STRIPE):
            if self.scheme.element == "float8":
                values = stripe.view(torch.float8_e4m3fn)
                values.copy_(torch.empty(values.shape, dtype=torch.bfloat16, device=device).normal_(generator=generator))
            else:
                stripe.view(torch.uint8).random_(0, 256, generator=generator)
        spread = {"int4": 4.6, "int8": 74.0, "float4": 2.8, "float8": 1.0}[self.scheme.element]
        self.scales.fill_(1.0 if self.factors is not None else std / spread)
        if self.factors is not None:
            self.factors.fill_(spread / std if self.layout.divides else std / spread)
        if self.zeros is not None:
            middle = sum((self.middle - self.layout.zero_offset) << bit for bit in range(0, WORD, self.scheme.bits))
            self.zeros.fill_(middle - (1 << WORD) if middle >> (WORD - 1) else middle)

    def in_format(self, format: Format) -> "LowBit":
        """Return the matrix in the final layout."""
        if self.scheme.layout == FINAL:
            return self
        bits, layout, factors, zeros, codes = self.scheme.bits, self.layout, self.factors, self.zeros, self.codes
        if zeros is not None and (layout.order or layout.zero_offset):
            zeros = unpacked_rows(zeros, bits, layout.order) + layout.zero_offset & (1 << bits) - 1  # GPTQ stores a zero point of 0 as -1
            zeros = packed_rows(zeros, bits)
        if factors is not None and layout.divides:
            factors = factors.reciprocal()
        if layout.packing == "rows":
            stripes = (unpacked_rows(each, bits, layout.order) for each in codes.split(STRIPE * bits // WORD))
            codes = torch.cat([packed_columns(each, bits) for each in stripes])
        return LowBit(self.scheme.final, self.shape, codes.view(torch.int32), self.scales, zeros, factors)

    def dequantized(self) -> torch.Tensor:
        """Return (N, K) in float32, of the final layout."""
        codes_NK, groups = unpacked_columns(self.codes, self.scheme.bits), self.scales.shape[1]
        values = _values(codes_NK, self.scheme.element).unflatten(1, (groups, -1))
        values = values - (self.middle if self.zeros is None else unpacked_rows(self.zeros, self.scheme.bits)[:, :, None].float())
        values = values * self.scales.float()[:, :, None]
        return (values if self.factors is None else values * self.factors[:, :, None]).flatten(1)


def _values(codes: torch.Tensor, element: str) -> torch.Tensor:
    """Return the values of codes (uint8) in float32, before zero points are subtracted."""
    if element == "float8":
        return codes.view(torch.float8_e4m3fn).float()
    if element == "float4":
        magnitudes = torch.tensor(FLOAT4, device=codes.device)
        return torch.where(codes > 7, -1.0, 1.0) * magnitudes[(codes & 7).int()]
    return codes.float()


@dataclass(frozen=True)
class LowBitKind:
    """Class methods of `Storage`, for a scheme."""

    scheme: Scheme

    def check(self, columns: int, rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        packed, group = WORD // self.scheme.bits, self.scheme.group or 1
        height = packed if LAYOUTS[self.scheme.layout].packing == "rows" or self.scheme.has_zeros else 1
        if columns % group or columns % packed or any(size % height for size in (*rows, *starts)):
            raise ValueError(f"{self.scheme} needs whole groups and words on every rank, got {sorted(set(rows))} x {columns} (--tp)")

    def empty(self, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> LowBit:
        self.check(columns, (rows,))
        scheme, layout = self.scheme, LAYOUTS[self.scheme.layout]
        groups, (height, width) = columns // scheme.group if scheme.group else 1, layout.block(scheme.bits)
        kind = {"pairs": torch.uint8, "values": torch.float8_e4m3fn}.get(layout.packing, torch.int32)
        scale_dtype = torch.float16 if layout.is_transposed and dtype.itemsize == 2 else dtype  # as AWQ and GPTQ have them
        if scheme.group == NVFP4_GROUP:
            scale_dtype = torch.float8_e4m3fn
        zeros = torch.empty((rows * scheme.bits // WORD, groups), dtype=torch.int32, device=device)
        return LowBit(
            scheme,
            torch.Size((rows, columns)),
            torch.empty((rows // height, columns // width), dtype=kind, device=device),
            torch.empty((rows, groups), dtype=scale_dtype, device=device),
            zeros if scheme.has_zeros else None,
            torch.empty((rows, 1), device=device) if scheme.group == NVFP4_GROUP else None,
        )

    def quantized(self, matrix_NK: torch.Tensor) -> LowBit:
        raise ValueError(f"matrices are not rounded to {self.scheme}: serve a checkpoint that has it")


class TorchLowBit(TorchProducts[LowBit]):
    """See `TorchProducts`."""

    def multiply(self, x_TX: torch.Tensor) -> torch.Tensor:
        return x_TX @ self.matrix.dequantized().to(x_TX.dtype).t()
