"""Our decoder and vision tower against transformers' with the same weights, float32 on the CPU."""

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from models.decoders.qwen3_vl import Qwen3VL
from tests.unit.models import reference
from tests.unit.models.harness import (
    PROMPTS,
    PagedRunner,
    Prompt,
    check_a_step_without_wanted_tokens,
    check_rows_of_one_step,
    every_logit,
    noise_image,
    relative,
    smooth_image,
)  # fmt: skip

MORE = ("text", "five images", "several turns")


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_of_every_token_equal_the_reference(tiny: Qwen3VL, reference_model: Qwen3VLForConditionalGeneration, name: str) -> None:
    prompt = Prompt.build(tiny.config, PROMPTS[name])
    assert relative(every_logit(tiny, prompt), reference.logits(reference_model, tiny.config, prompt)) < 1e-4


@pytest.mark.parametrize("name", ["one image", "videos", *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_greedy_tokens_equal_the_reference_for_any_chunking(
    tiny: Qwen3VL, reference_model: Qwen3VLForConditionalGeneration, name: str
) -> None:
    prompt = Prompt.build(tiny.config, PROMPTS[name])
    expected = reference.greedy(reference_model, tiny.config, prompt, steps=32)
    for chunk in (1 << 30, 64, 7, *([1] if name == "text" else [])):
        assert PagedRunner(tiny).greedy(prompt, steps=32, chunk=chunk) == expected, f"chunks of {chunk}"


def test_rows_of_one_step_do_not_see_each_other(tiny: Qwen3VL) -> None:
    check_rows_of_one_step(tiny)


def test_a_step_without_wanted_tokens_still_stores_keys(tiny: Qwen3VL) -> None:
    check_a_step_without_wanted_tokens(tiny)


def test_encode_in_one_call_equals_encode_alone(tiny: Qwen3VL) -> None:
    images = [noise_image(256, 256, 1), smooth_image(300, 400), noise_image(256, 256, 2)]
    grids = [tiny.config.geometry.grid(*image.shape[:2]) for image in images]
    together = tiny.tower.encode(images, grids)
    for image, grid, embedding in zip(images, grids, together, strict=True):
        torch.testing.assert_close(embedding, tiny.tower.encode([image], [grid])[0], rtol=1e-4, atol=1e-4)
        assert embedding.untyped_storage().nbytes() == embedding.nbytes, "an evicted image must free its memory"
