"""Our decoder and vision tower against transformers' with the same weights, float32 on the CPU.

Red when a change alters any number: positions, patch order, norms, DeepStack levels, masks, or the order of pages.
"""

import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration

from models.decoders.qwen3_vl import Qwen3VL
from tests.unit.models import reference
from tests.unit.models.harness import FIVE_IMAGES, ONE_IMAGE, PROMPTS, SEVERAL_TURNS, TEXT, PagedRunner, Prompt, noise_image, smooth_image

MORE = ("text", "five images", "several turns")


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_of_every_token_equal_the_reference(tiny: Qwen3VL, reference_model: Qwen3VLForConditionalGeneration, name: str) -> None:
    prompt = Prompt.build(tiny.config, PROMPTS[name])
    runner = PagedRunner(tiny)
    session = runner.start(prompt)
    ours = runner.step([(session, len(prompt.ids))], num_prefill_rows=1, want="all")
    assert relative(ours, reference.logits(reference_model, tiny.config, prompt)) < 1e-4


@pytest.mark.parametrize("name", ["one image", "videos", *(pytest.param(name, marks=pytest.mark.nightly) for name in MORE)])
def test_greedy_tokens_equal_the_reference_for_any_chunking(
    tiny: Qwen3VL, reference_model: Qwen3VLForConditionalGeneration, name: str
) -> None:
    prompt = Prompt.build(tiny.config, PROMPTS[name])
    expected = reference.greedy(reference_model, tiny.config, prompt, steps=32)
    for chunk in (1 << 30, 64, 7, *([1] if name == "text" else [])):
        assert PagedRunner(tiny).greedy(prompt, steps=32, chunk=chunk) == expected, f"chunks of {chunk}"


def test_rows_of_one_step_do_not_see_each_other(tiny: Qwen3VL) -> None:
    """A step with a first chunk, a later chunk inside an image and two decode rows gives each row what it gets alone."""
    prompts = [Prompt.build(tiny.config, parts) for parts in (ONE_IMAGE, FIVE_IMAGES, TEXT, SEVERAL_TURNS)]
    done = (0, 100, len(prompts[2].ids) - 1, len(prompts[3].ids) - 1)  # tokens computed before the step
    counts = (60, 77, 1, 1)
    runner = PagedRunner(tiny)
    sessions = [runner.start(prompt) for prompt in prompts]
    for session, before in zip(sessions, done, strict=True):
        if before:
            runner.step([(session, before)], num_prefill_rows=1)
    together = runner.step(list(zip(sessions, counts, strict=True)), num_prefill_rows=2)
    for row, (prompt, before, count) in enumerate(zip(prompts, done, counts, strict=True)):
        alone = PagedRunner(tiny)
        expected = alone.step([(alone.start(prompt), before + count)], num_prefill_rows=1)
        torch.testing.assert_close(together[row], expected[0], rtol=1e-3, atol=1e-3)


def test_a_step_without_wanted_tokens_still_stores_keys(tiny: Qwen3VL) -> None:
    """A chunk in the middle of a prompt asks for no logits; the chunk after it must find its keys."""
    prompt = Prompt.build(tiny.config, ONE_IMAGE)
    runner = PagedRunner(tiny)
    session = runner.start(prompt)
    assert runner.step([(session, 50)], num_prefill_rows=1, want="none").shape == (0, tiny.config.text.vocab_size)
    logits = runner.prefill(session, chunk=1 << 30)
    torch.testing.assert_close(logits, PagedRunner(tiny).prefill(runner.start(prompt), chunk=1 << 30), rtol=1e-3, atol=1e-3)


def test_encode_in_one_call_equals_encode_alone(tiny: Qwen3VL) -> None:
    images = [noise_image(256, 256, 1), smooth_image(300, 400), noise_image(256, 256, 2)]
    grids = [tiny.config.geometry.grid(*image.shape[:2]) for image in images]
    together = tiny.tower.encode(images, grids)
    for image, grid, embedding in zip(images, grids, together, strict=True):
        torch.testing.assert_close(embedding, tiny.tower.encode([image], [grid])[0], rtol=1e-4, atol=1e-4)
        assert embedding.untyped_storage().nbytes() == embedding.nbytes, "an evicted image must free its memory"
