"""Matrices in float8 with a scale per block of 128 x 128, as in the published FP8 checkpoints. A product also rounds its input, with a
scale per token and 128 values, and accumulates in float32, as in transformers' `finegrained_fp8`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from models.kernels.reference.products import TorchProducts
from models.kernels.stream import Rounded
from models.weights.matrix import Stored

BLOCK = 128
LARGEST = 448.0  # largest value of float8_e4m3fn
UNIT = 64.0  # standard deviation of random values before they are scaled
STRIPE = 1 << 14  # rows of random values generated at a time
LEAST_SCALE = 1e-30  # scale of a group of zeros
SCALE_ALIGNMENT = 4  # cuBLAS requires scales padded to multiples: weights' rows and inputs' columns


@dataclass(frozen=True)
class BlockScaled:
    """See `Storage`: float8_e4m3fn values with a scale per block, float32 (N / 128, K / 128), padded. Value = float8 * scale."""

    values: torch.Tensor
    padded_scales: torch.Tensor

    @staticmethod
    def check(columns: int, rows: Sequence[int], starts: Sequence[int] = ()) -> None:
        if any(size % BLOCK for size in (columns, *rows, *starts)):
            shapes = " and ".join(f"{count} x {columns}" for count in sorted(set(rows)))
            raise ValueError(f"FP8 needs matrices of whole blocks, {BLOCK} x {BLOCK}, on every rank, got {shapes} (--quantization, --tp)")

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> "BlockScaled":
        cls.check(columns, (rows,))
        values = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
        padded = -(-columns // BLOCK // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        return cls(values, torch.zeros((rows // BLOCK, padded), device=device))

    @classmethod
    def quantized(cls, matrix_NK: torch.Tensor) -> "BlockScaled":
        """Quantize so that each block's largest value becomes LARGEST."""
        rows, columns = matrix_NK.shape
        made = cls.empty(rows, columns, matrix_NK.device)
        made.quantize_(matrix_NK)
        return made

    def quantize_(self, matrix_NK: torch.Tensor) -> None:
        """Replace the values by those of `quantized`."""
        for start in range(0, len(matrix_NK), BLOCK):  # float32 copies of whole matrices would not fit in addition to them
            stripe = matrix_NK[start : start + BLOCK].float().unflatten(1, (-1, BLOCK))
            scale = (stripe.abs().amax((0, 2)) / LARGEST).clamp_(min=LEAST_SCALE)
            self.scales[start // BLOCK].copy_(scale)
            self.values[start : start + BLOCK].copy_((stripe / scale[:, None]).flatten(1))

    def in_format(self, format: str) -> "BlockScaled":
        return self

    def fill_normal_(self, std: float, generator: torch.Generator) -> None:
        for stripe in self.values.split(STRIPE):
            normal = torch.empty(stripe.shape, dtype=torch.bfloat16, device=stripe.device).normal_(generator=generator)
            stripe.copy_(normal.mul_(UNIT).clamp_(-LARGEST, LARGEST))
        self.scales.fill_(std / UNIT)

    @property
    def stored(self) -> tuple[Stored, ...]:
        return Stored(".weight", self.values), Stored(".weight_scale_inv", self.scales, (BLOCK, BLOCK))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def scales(self) -> torch.Tensor:
        """Return (N / 128, K / 128)."""
        return self.padded_scales[:, : self.values.shape[1] // BLOCK]

    @cached_property
    def transposed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values and padded scales as cuBLAS takes them; cached, since creating them takes as long as launching a product."""
        return self.values.t(), self.padded_scales.t()

    def rows(self, first: int, last: int) -> "BlockScaled":
        return BlockScaled(self.values[first:last], self.padded_scales[first // BLOCK : last // BLOCK])

    def dequantized(self) -> torch.Tensor:
        """Return (N, K) in float32."""
        rows, columns = self.shape
        blocks = self.values.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK) * self.scales[:, None, :, None]
        return blocks.view(rows, columns)


@dataclass(frozen=True, slots=True)
class GroupScaled(Rounded):
    """Inputs (T, K) of a product: float8_e4m3fn values with a scale per group, float32 (T, K / 128), column-major. `padded` has up to three
    further rows, whose values and scales are undefined."""

    padded: torch.Tensor
    scales: torch.Tensor
    num_tokens: int

    def __len__(self) -> int:
        return self.num_tokens

    @property
    def values(self) -> torch.Tensor:
        return self.padded[: self.num_tokens]

    @classmethod
    def empty(cls, num_tokens: int, width: int, device: torch.device) -> "GroupScaled":
        num_rows = -(-num_tokens // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
        padded = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=device)
        return cls(padded, torch.empty((width // BLOCK, num_rows), device=device).t(), num_tokens)

    @classmethod
    def like(cls, x_TK: torch.Tensor) -> "GroupScaled":
        return cls.empty(len(x_TK), x_TK.shape[1], x_TK.device)

    @classmethod
    def quantized(cls, x_TK: torch.Tensor) -> "GroupScaled":
        """Quantize so that each group's largest value becomes LARGEST."""
        made, groups = cls.like(x_TK), x_TK.float().unflatten(1, (-1, BLOCK))
        scales = (groups.abs().amax(2) / LARGEST).clamp_(min=LEAST_SCALE)
        made.scales[: len(made)].copy_(scales)
        made.values.copy_((groups / scales[:, :, None]).flatten(1))
        return made

    def dequantized(self) -> torch.Tensor:
        """Return (T, K) in float32."""
        return (self.values.float().unflatten(1, (-1, BLOCK)) * self.scales[: self.num_tokens, :, None]).flatten(1)


class TorchFloat8(TorchProducts[BlockScaled]):
    """See `TorchProducts`."""

    def multiply(self, x_TX: torch.Tensor) -> torch.Tensor:
        return (GroupScaled.quantized(x_TX).dequantized() @ self.matrix.dequantized().t()).to(x_TX.dtype)
