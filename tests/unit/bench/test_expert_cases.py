"""The kernel benchmark of a mixture's layer: operations and bytes by hand, and that the cases run. Red if its bounds are wrong."""

import pytest
import torch

from bench.kernels.__main__ import model_config
from bench.kernels.expert_cases import expert_cases
from models.kernels.reference.ops import TorchOps


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_operations_and_bytes(num_tokens: int) -> None:
    text = model_config("tiny-moe").text
    assert text.moe is not None
    torch.manual_seed(0)
    plain, float8 = expert_cases(text, TorchOps(), torch.device("cpu"), num_tokens)
    expert, router = 3 * text.hidden_size * text.moe.intermediate_size, 2 * text.hidden_size * text.moe.num_experts
    touched = 2 if num_tokens == 1 else text.moe.num_experts
    assert plain.flops == 2 * num_tokens * text.moe.num_experts_per_tok * expert and plain.num_bytes == 2 * touched * expert + router
    assert float8.flops == plain.flops / 2 and float8.num_bytes == touched * expert + router
    for case in (plain, float8):
        case.calls[0]()


def test_dense_models_have_none() -> None:
    assert not list(expert_cases(model_config("tiny").text, TorchOps(), torch.device("cpu"), 1))
