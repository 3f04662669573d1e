"""Low-rank matrices of all slots for one product, and the operation on them."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from models.lora.targets import RANK_STEP


@dataclass(frozen=True, slots=True)
class LowRank:
    """For a token of slot s, row n of the product in range [first, last) of group g gets B[s, n] @ (A[s, g] @ x).

    Groups are the checkpoint's matrices that are fused. Values beyond the rank of a slot's group are undefined.
    """

    a_SGRK: torch.Tensor
    b_SNR: torch.Tensor
    ranks_SG: torch.Tensor  # int32: multiples of RANK_STEP
    ranges: tuple[tuple[int, int, int], ...]  # first, last, group
    blocks_B3: torch.Tensor  # int32: the ranges cut into blocks of at most BLOCK_ROWS rows
    groups_N: torch.Tensor  # int32: group of each row
    alignment: int  # largest power of two, at most RANK_STEP, of which the ranges' bounds are multiples


BLOCK_ROWS = 64


def make_low_rank(
    num_slots: int, rank: int, inputs: int, ranges: tuple[tuple[int, int, int], ...], device: torch.device, dtype: torch.dtype
) -> LowRank:
    groups, outputs = 1 + max(group for _, _, group in ranges), max(last for _, last, _ in ranges)
    blocks = [(start, min(start + BLOCK_ROWS, last), group) for first, last, group in ranges for start in range(first, last, BLOCK_ROWS)]
    return LowRank(
        a_SGRK=torch.zeros((num_slots, groups, rank, inputs), dtype=dtype, device=device),
        b_SNR=torch.zeros((num_slots, outputs, rank), dtype=dtype, device=device),
        ranks_SG=torch.zeros((num_slots, groups), dtype=torch.int32, device=device),
        ranges=ranges,
        blocks_B3=torch.tensor(blocks, dtype=torch.int32, device=device),
        groups_N=torch.cat([torch.full((last - first,), group, dtype=torch.int32) for first, last, group in ranges]).to(device),
        alignment=math.gcd(RANK_STEP, *(bound for first, last, _ in ranges for bound in (first, last))),
    )


@dataclass(slots=True)
class TokenSlots:
    """Slots of the tokens of a forward pass."""

    slots_T: torch.Tensor  # int32, -1: no adapter
    tiles: object = None  # what an implementation of `LowRankOps` derives from them, once per pass


class LowRankOps(Protocol):
    """Operations of a backend on low-rank matrices."""

    def shrink(self, x_TK: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> torch.Tensor:
        """Return A @ x with A of each token's slot in parts: (parts, T, groups * ranks), or with tokens in another order. Other values
        are undefined."""

    def expand_(self, out_TN: torch.Tensor, shrunk_PTR: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> None:
        """out += B of each token's slot @ the sum of the parts."""

    def expand_swiglu(self, gate_up_TN: torch.Tensor, shrunk_PTR: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> torch.Tensor:
        """Return silu(g) * u of the halves g and u of what `expand_` makes of `gate_up_TN`, which may change. Their blocks are alike."""


def _tokens_of(slots_T: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    for slot in slots_T.unique().tolist():
        if slot >= 0:
            yield slot, (slots_T == slot).nonzero()[:, 0]


class TorchLowRank:
    """See `LowRankOps`: the reference. Products are float32."""

    def shrink(self, x_TK: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> torch.Tensor:
        shrunk_TGR = x_TK.new_zeros((len(x_TK), *low_rank.a_SGRK.shape[1:3]), dtype=torch.float32)
        for slot, tokens in _tokens_of(slots.slots_T):
            for group, rank in enumerate(low_rank.ranks_SG[slot].tolist()):
                shrunk_TGR[tokens, group, :rank] = x_TK[tokens].float() @ low_rank.a_SGRK[slot, group, :rank].float().t()
        return shrunk_TGR.flatten(1)[None]

    def expand_(self, out_TN: torch.Tensor, shrunk_PTR: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> None:
        shrunk_TGR = shrunk_PTR.sum(0).unflatten(1, low_rank.a_SGRK.shape[1:3])
        for slot, tokens in _tokens_of(slots.slots_T):
            for first, last, group in low_rank.ranges:
                rank = int(low_rank.ranks_SG[slot, group])
                change = shrunk_TGR[tokens, group, :rank] @ low_rank.b_SNR[slot, first:last, :rank].float().t()
                out_TN[tokens, first:last] = (out_TN[tokens, first:last].float() + change).to(out_TN.dtype)

    def expand_swiglu(self, gate_up_TN: torch.Tensor, shrunk_PTR: torch.Tensor, low_rank: LowRank, slots: TokenSlots) -> torch.Tensor:
        self.expand_(gate_up_TN, shrunk_PTR, low_rank, slots)
        gate, up = gate_up_TN.chunk(2, dim=-1)
        return F.silu(gate) * up


OPS = {  # by the name of the backend
    "torch": "models.lora.low_rank:TorchLowRank",
    "portable": "models.kernels.triton.lora:TritonLowRank",
    "hopper": "models.kernels.triton.lora:TritonLowRank",
}
