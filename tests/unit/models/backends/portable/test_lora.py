"""Kernels of adapters in Triton's interpreter against the reference."""

import pytest
import torch

from models.lora.low_rank import LowRank, LowRankOps, TokenSlots, TorchLowRank, make_low_rank
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted

RANKS = ((16, 0, 48), (32, 16, 0), (0, 0, 0), (48, 48, 48), (16, 16, 16))  # of the groups of each slot; more than share programs


def random_low_rank(inputs: int, ranges: tuple[tuple[int, int, int], ...], generator: torch.Generator) -> LowRank:
    """Values beyond a rank are not numbers: nothing may read them."""
    made = make_low_rank(len(RANKS), 48, inputs, ranges, torch.device("cpu"), torch.float32)
    made.ranks_SG.copy_(torch.tensor(RANKS)[:, : made.ranks_SG.shape[1]])
    made.a_SGRK.normal_(generator=generator)
    made.b_SNR.normal_(generator=generator)
    for slot in range(len(RANKS)):
        for first, last, group in ranges:
            rank = int(made.ranks_SG[slot, group])
            made.a_SGRK[slot, group, rank:] = torch.nan
            made.b_SNR[slot, first:last, rank:] = torch.nan
    return made


@interpreted
@pytest.mark.parametrize(
    ("num_tokens", "inputs", "ranges"),
    [
        pytest.param(5, 72, ((0, 96, 0), (96, 128, 1), (128, 160, 2), (160, 200, 0)), marks=in_gate),  # gates follow values
        (1, 1032, ((0, 70, 0),)),
        (70, 264, ((0, 64, 0), (64, 130, 1))),
        (1100, 128, ((0, 40, 0), (40, 80, 1))),
    ],
)
def test_low_rank_products(num_tokens: int, inputs: int, ranges: tuple[tuple[int, int, int], ...]) -> None:
    from models.kernels.triton.lora import TritonLowRank

    generator = torch.Generator().manual_seed(1)
    low_rank = random_low_rank(inputs, ranges, generator)
    x_TK = torch.randn((num_tokens, inputs), generator=generator)
    slots_T = torch.randint(-1, len(RANKS), (num_tokens,), generator=generator, dtype=torch.int32)
    slots_T[0] = 0
    outputs = low_rank.b_SNR.shape[1]
    ours = torch.randn((num_tokens, outputs + 3), generator=generator)
    expected = ours.clone()
    for ops, found in ((TritonLowRank(), ours), (TorchLowRank(), expected)):
        slots = TokenSlots(slots_T)
        ops.expand_(found[:, :outputs], ops.shrink(x_TK, low_rank, slots), low_rank, slots)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-3)


@interpreted
@pytest.mark.parametrize("num_tokens", [pytest.param(5, marks=in_gate), 70, 1100])
def test_swiglu(num_tokens: int) -> None:
    from models.kernels.triton.lora import TritonLowRank

    generator = torch.Generator().manual_seed(3)
    low_rank = random_low_rank(72, ((0, 80, 0), (80, 160, 1)), generator)
    low_rank.b_SNR.mul_(0.1)  # halves of about 5, whose product differs by less than the tolerance
    x_TK, gate_up = torch.randn((num_tokens, 72), generator=generator), torch.randn((num_tokens, 160), generator=generator)
    slots_T = torch.randint(-1, len(RANKS), (num_tokens,), generator=generator, dtype=torch.int32)
    both: tuple[LowRankOps, ...] = (TritonLowRank(), TorchLowRank())
    found = []
    for ops in both:
        slots = TokenSlots(slots_T)
        found.append(ops.expand_swiglu(gate_up.clone(), ops.shrink(x_TK, low_rank, slots), low_rank, slots))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-3)
