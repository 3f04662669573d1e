"""Sizes and positions against transformers."""

import random

import numpy as np
import pytest
import torch
from transformers import Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_smart_resize

from models.media.geometry import VisionGeometry, smart_resize
from models.media.mrope import mrope_positions

PUBLISHED = VisionGeometry(patch_size=16, merge_size=2, temporal_patch_size=2, min_pixels=65_536, max_pixels=16_777_216)


def test_smart_resize_equals_the_reference() -> None:
    rng = random.Random(0)
    for _ in range(20_000):
        height = round(10 ** rng.uniform(0, 4.2))
        width = min(200 * height, max(-(-height // 200), round(10 ** rng.uniform(0, 4.2))))
        args = (height, width, 32, PUBLISHED.min_pixels, PUBLISHED.max_pixels)
        assert smart_resize(*args) == reference_smart_resize(*args)


@pytest.mark.parametrize(("height", "width"), [(0, 10), (10, 0), (1, 201), (20_000, 1)])
def test_impossible_sizes_are_value_errors(height: int, width: int) -> None:
    with pytest.raises(ValueError, match=f"{width}x{height}"):
        PUBLISHED.grid(height, width)


def test_mrope_positions_equal_the_reference(reference_model: Qwen3VLForConditionalGeneration) -> None:
    rng = random.Random(0)
    for _ in range(100):
        types: list[int] = []
        spans, grids = [], []
        for _ in range(rng.randrange(6)):
            types += [0] * rng.randrange(1, 9)  # at least one token between two images, as the template has
            t, h, w = rng.choice((1, 1, 1, 9)), rng.randrange(1, 7), rng.randrange(1, 7)
            spans.append((len(types), (t, h, w)))
            grids.append([t, 2 * h, 2 * w])
            types += [1] * (t * h * w)
        types += [0] * rng.randrange(0 if types else 1, 9)
        expected, delta = reference_model.model.get_rope_index(
            torch.zeros(1, len(types), dtype=torch.long),
            mm_token_type_ids=torch.tensor([types]),
            image_grid_thw=torch.tensor(grids) if grids else None,
        )
        ours, our_delta = mrope_positions(len(types), spans)
        np.testing.assert_array_equal(ours, expected[:, 0].numpy())
        assert our_delta == int(delta)


@pytest.mark.parametrize("spans", [[(0, (1, 2, 2)), (3, (1, 1, 1))], [(5, (1, 2, 3))]])
def test_spans_that_do_not_fit_are_value_errors(spans: list[tuple[int, tuple[int, int, int]]]) -> None:
    with pytest.raises(ValueError, match="span"):
        mrope_positions(10, spans)
