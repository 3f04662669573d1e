"""Rotary tables, float32 (rows, K): for the K values of a head, K / 2 cosines, then K / 2 sines. Interleaved M-RoPE rows of a step and
axial rows of a patch grid."""

import math

import torch

from models.config.types import TextConfig
from models.kernels.ops import Ops


class MRope:
    """Position triples -> cos/sin rows. Pair i follows time, height or width: T H W T H W ... up to the ends of the sections, then time."""

    def __init__(self, config: TextConfig, ops: Ops, device: torch.device) -> None:
        self._ops = ops
        half = config.rotary_dim // 2
        axis = torch.zeros(half, dtype=torch.int64)
        for dim in (1, 2):
            axis[dim : 3 * config.mrope_section[dim] : 3] = dim
        self._axis_of_pair = axis.to(device)
        inv_freq_J = inverse_frequencies(config.rope_theta, config.rotary_dim)
        self._inv_freq = (llama3(inv_freq_J, *config.llama3) if config.llama3 else inv_freq_J).to(device)

    def rows(self, positions_3T: torch.Tensor) -> torch.Tensor:
        """(3, T) integer positions -> (T, K) float32; formula of transformers' `Qwen3VLTextRotaryEmbedding`."""
        return self._ops.rotary_rows(positions_3T, self._axis_of_pair, self._inv_freq)


def inverse_frequencies(theta: float, dim: int) -> torch.Tensor:
    """theta ** (-2 i / dim) for i < dim / 2, float32 on the CPU."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def llama3(inv_freq_J: torch.Tensor, factor: float, low: float, high: float, positions: float) -> torch.Tensor:
    """Divide frequencies with fewer than `low` periods in `positions` by `factor`, keep those with `high` or more, interpolate between, as
    transformers' `_compute_llama3_parameters`."""
    kept_J = ((positions * inv_freq_J / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return inv_freq_J * ((1 - kept_J) / factor + kept_J)


def vision_rows(row_P: torch.Tensor, column_P: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """(P,) patch coordinates -> (P, K) float32: a quarter of the head follows the row, a quarter the column, then both again, as in
    transformers' `Qwen3VLVisionRotaryEmbedding`. `inv_freq`: `inverse_frequencies` of half a head."""
    angles_PJ = torch.cat((row_P[:, None].float() * inv_freq, column_P[:, None].float() * inv_freq), dim=-1)
    return torch.cat((angles_PJ.cos(), angles_PJ.sin()), dim=-1)
