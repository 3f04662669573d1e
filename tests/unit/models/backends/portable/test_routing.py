"""The router's Triton kernels in the interpreter against plain torch."""

import pytest
import torch

from models.kernels.ops import Experts
from models.kernels.reference.moe import route as torch_route
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted


@interpreted
@pytest.mark.parametrize(
    ("num_experts", "chosen", "has_shared", "dtype", "num_parts"),
    [
        (8, 2, False, torch.float32, 1), (128, 8, True, torch.float16, 1), (60, 4, False, torch.bfloat16, 3),
        pytest.param(5, 3, True, torch.float32, 1, marks=in_gate), (5, 3, True, torch.bfloat16, 2),
    ],
)  # fmt: skip
def test_routes(num_experts: int, chosen: int, has_shared: bool, dtype: torch.dtype, num_parts: int) -> None:
    from models.kernels.triton.routing import route

    torch.manual_seed(0)
    logits = torch.randn(9, num_experts + 8 * has_shared).to(torch.bfloat16).to(dtype)  # ties
    logits[3], logits[4, 0], logits[5], logits[6] = 0, 300, -300, -logits[6].abs()
    nothing = torch.empty(0)
    experts = Experts(nothing, nothing, nothing, 0, num_experts + has_shared, num_experts, chosen, has_shared)
    parts, counts = logits[None], torch.zeros(experts.count, dtype=torch.int32)
    if num_parts > 1:
        rest = torch.randint(-8, 8, (num_parts - 1, *logits.shape)).float()  # exact sums
        parts = torch.cat((logits.float()[None] - rest.sum(0), rest))
    choices = route(parts, experts, None, logits.new_empty(experts.num_given, 9, 16), counts)
    assert choices.listed_EM is not None
    listed = [row[:count] for row, count in zip(choices.listed_EM.tolist(), counts.tolist(), strict=True)]
    of_expert = choices.experts_TK.flatten()
    assert [sorted(row) for row in listed] == [torch.nonzero(of_expert == expert).flatten().tolist() for expert in range(experts.count)]
    best = logits[:, :num_experts].sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    assert choices.experts_TK.tolist() == [[*row, *[num_experts] * has_shared] for row in best.tolist()]
    torch.testing.assert_close(choices.weights_TK, torch_route(logits, experts)[0])
