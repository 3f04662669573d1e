"""`VarlenAttention` in plain torch, segment by segment."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from models.kernels.reference.ops import rotate


class TorchVarlen:
    """See `VarlenAttention`."""

    def __init__(self) -> None:
        self._lengths: list[int] = []

    def plan(self, lengths: Sequence[int]) -> None:
        self._lengths = list(lengths)

    def run(self, kvq_P3HK: torch.Tensor, cos_sin_PK: torch.Tensor) -> torch.Tensor:
        k_PHK, v_PHK, q_PHK = kvq_P3HK.unbind(1)
        heads = rotate(q_PHK, cos_sin_PK), rotate(k_PHK, cos_sin_PK), v_PHK
        segments = zip(*(x_PHK.transpose(0, 1).split(self._lengths, dim=1) for x_PHK in heads), strict=True)
        return torch.cat([F.scaled_dot_product_attention(q, k, v).transpose(0, 1) for q, k, v in segments]).flatten(1)
