"""The router's Triton kernels in the interpreter against plain torch."""

import pytest
import torch

from models.kernels.ops import Experts
from models.kernels.reference.moe import route as torch_route
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted


@interpreted
@pytest.mark.parametrize(
    ("num_experts", "chosen", "has_shared", "dtype"),
    [
        (8, 2, False, torch.float32), (128, 8, True, torch.float16), (60, 4, False, torch.float16),
        pytest.param(5, 3, True, torch.float32, marks=in_gate), (5, 3, False, torch.float16),
    ],
)  # fmt: skip
def test_routes(num_experts: int, chosen: int, has_shared: bool, dtype: torch.dtype) -> None:
    from models.kernels.triton.routing import route

    torch.manual_seed(0)
    logits = torch.randn(9, num_experts + 8 * has_shared).to(torch.bfloat16).to(dtype)  # ties
    logits[3], logits[4, 0], logits[5], logits[6] = 0, 300, -300, -logits[6].abs()
    nothing = torch.empty(0)
    experts = Experts(nothing, nothing, nothing, 0, num_experts + has_shared, num_experts, chosen, has_shared)
    choices = route(logits, experts, None, logits.new_empty(experts.num_given, 9, 16), counted=True)
    best = logits[:, :num_experts].sort(dim=-1, descending=True, stable=True).indices[:, :chosen]
    assert choices.experts_TK.tolist() == [[*row, *[num_experts] * has_shared] for row in best.tolist()]
    torch.testing.assert_close(choices.weights_TK, torch_route(logits, experts)[0])
