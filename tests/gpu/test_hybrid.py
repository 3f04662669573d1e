"""Attention of 128 and 256 values a head against torch, a few layers of 30B-A3B, 3.5-9B and 3.5-35B-A3B against transformers with the same
random weights, eager and in graphs: errors that a third of the tokens stay below, since near ties of routers flip in up to half.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from models.config.huggingface import read_config
from models.decoders.contract import make_model
from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.backend import Backend
from models.kernels.reference.attention import TorchAttention
from models.parallel.group import TensorParallel
from models.scaffold import SHAPES, write_model_folder
from tests.gpu.generated import fill_generated, reference_logits
from tests.gpu.test_model_parity import PROMPTS, TOLERANCE, check_repeated_layers, graph_logits, whole
from tests.unit.models.backends.hopper.attention_step import Step
from tests.unit.models.harness import Prompt, relative

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

DEVICE = torch.device("cuda")
SLACK = 1.25
Expected = dict[str, tuple[torch.Tensor, float]]
ATTENTION = {  # heads, KV heads, values of a head
    "2B": (8, 2, 256), "9B": (16, 4, 256), "27B": (24, 4, 256), "27B over four": (6, 1, 256), "35B": (16, 2, 256), "122B": (32, 2, 256),
    "VL 8B": (32, 8, 128),
}  # fmt: skip


@pytest.mark.parametrize("size", ATTENTION)
def test_attention_equals_the_reference(backend: Backend, size: str) -> None:
    num_heads, num_kv, head_dim = ATTENTION[size]
    step = Step.build([300, 5000, 1, 4097], (num_heads, num_kv), head_dim, tokens=[200, 40, 1, 1]).with_finite_values()
    step = step.to(DEVICE, torch.bfloat16)
    layout = replace(step.layout, num_prefill_rows=2)
    found = []
    for attention in (backend.attention([step.pool], num_heads), TorchAttention([step.pool])):
        attention.plan(layout)
        found.append(attention.run(0, step.q))
    assert relative(found[0].float(), found[1].float()) < 1e-2


def usual(found: torch.Tensor, expected: torch.Tensor, model: Qwen3VL) -> float:
    """Return the relative error that half of the tokens, with experts a third of them, stay below."""
    share = 1 / 3 if model.config.text.moe else 1 / 2
    return float(((found.float() - expected.float()).norm(dim=1) / expected.float().norm(dim=1)).quantile(share))


@pytest.fixture(scope="module", params=["30B-A3B", "3.5-9B", "3.5-35B-A3B"])
def model(request: pytest.FixtureRequest, backend: Backend, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Qwen3VL, Path]]:
    folder = tmp_path_factory.mktemp(request.param)
    write_model_folder(folder, replace(SHAPES[request.param], layers=4 if request.param == "30B-A3B" else 8), weights="none", seed=0)
    ours = make_model(read_config(folder), TensorParallel.single(), backend, torch.bfloat16)
    assert isinstance(ours, Qwen3VL)
    fill_generated(ours)
    with torch.inference_mode():
        yield ours, folder


@pytest.fixture(scope="module")
def expected(model: tuple[Qwen3VL, Path]) -> Expected:
    """The reference's logits and how far from these ours may be. Of hybrids in float32, and a little farther than its own in bfloat16."""
    (ours, folder), make = model, AutoModelForImageTextToText.from_config
    rounded = reference_logits(make, ours, folder, PROMPTS)
    if ours.config.text.delta is None:
        return {name: (rounded[name], TOLERANCE) for name in rounded}
    exact = reference_logits(make, ours, folder, PROMPTS, torch.float32)
    return {name: (exact[name], SLACK * usual(rounded[name], exact[name], ours)) for name in exact}


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_equal_transformers(model: tuple[Qwen3VL, Path], backend: Backend, expected: Expected, name: str) -> None:
    ours, _ = model
    reference, limit = expected[name]
    assert usual(whole(ours, backend, Prompt.build(ours.config, PROMPTS[name])), reference, ours) < limit


@pytest.mark.parametrize("decodes", [(4,), (1, 4)])
def test_graphs_equal_transformers(model: tuple[Qwen3VL, Path], backend: Backend, expected: Expected, decodes: tuple[int, ...]) -> None:
    (found, ends), (reference, limit) = graph_logits(model[0], backend, decodes), expected["text"]
    assert usual(found, reference[ends], model[0]) < limit


@pytest.mark.parametrize("num_tokens", [14, 30, 100, 250, 700])
def test_repeated_layers_compute_the_same(model: tuple[Qwen3VL, Path], backend: Backend, num_tokens: int) -> None:
    check_repeated_layers(model[0], backend, num_tokens)
