"""Adapters on one GPU at the sizes of 8B: a model against merged weights."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.backend import Backend
from models.lora.adapter import read_adapter
from models.lora.slots import AdapterSlots, read_weights
from models.parallel.group import TensorParallel
from models.scaffold.adapters import write_adapter
from tests.gpu.generated import config_of, fill_generated
from tests.unit.models import adapters
from tests.unit.models.harness import PagedRunner, Prompt, relative, smooth_image
from tests.unit.models.test_lora import AdaptedRunner

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

MAX_RANK = 64


@pytest.mark.parametrize("quantized_to", [None, "float8"])
def test_logits_are_those_of_merged_weights(backend: Backend, tmp_path: Path, quantized_to: str | None) -> None:
    config = config_of("8B", tmp_path / "model")
    config = replace(config, text=replace(config.text, num_layers=8))
    folders = [write_adapter(tmp_path / str(i), config, i, (16, 40)[i], takes=lambda _: True, strength=0.3) for i in range(2)]
    weights = [read_weights(read_adapter(folder, config, MAX_RANK), torch.bfloat16) for folder in folders]
    prompt = Prompt.build(config, [list(range(1000, 90_000, 971)), smooth_image(320, 480), list(range(7, 300, 13))])

    def model_of(quantized: str | None) -> Qwen3VL:
        model = Qwen3VL(
            replace(config, text=replace(config.text, quantized_to=quantized)), TensorParallel.single(), backend, torch.bfloat16
        )
        fill_generated(model)
        return model

    expected = []
    with torch.inference_mode():
        for folder in (None, *folders):
            model = model_of(None)
            if folder is not None:
                adapters.merge_(model, folder)
            runner = PagedRunner(model, num_blocks=256, page_size=16, backend=backend)
            expected.append(runner.step([(runner.start(prompt), len(prompt.ids))], 1, want="all"))
        model = model_of(quantized_to)
        model.finish()
        slots = AdapterSlots(model, backend, 4, MAX_RANK)
        for slot, found in enumerate(weights):
            slots.load(slot, found)
        ours = AdaptedRunner(model, slots, num_blocks=256, page_size=16, backend=backend)
        sessions = [ours.start_with(slot, prompt) for slot in (-1, 0, 1)]
        alone = ours.start_with(1, prompt)  # its last layer multiplies a single token
        last = ours.step([(alone, len(prompt.ids))], 1)
        size = len(prompt.ids)
        first = ours.step([(session, size - 2) for session in sessions], 3, want="all").split(size - 2)
        second = ours.step([(session, 1) for session in sessions], 0)
        third = [ours.step([(session, 1)], 0) for session in sessions]
    tolerance = 2e-2 if quantized_to is None else 8e-2
    for row, whole in enumerate(expected):
        assert relative(torch.cat((first[row], second[row : row + 1], third[row])), whole) < tolerance, row
    assert relative(last, expected[2][-1:]) < tolerance
    assert relative(expected[1], expected[0]) > 0.1
