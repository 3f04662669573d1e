"""Our resize, rounding and patch order against transformers' Pillow image processor."""

import numpy as np
import PIL
import pytest
import torch
from PIL import Image

from models.decoders.qwen3_vl import Qwen3VL
from models.kernels.ops import TAP_BITS
from models.vision.preprocess import make_taps
from tests.unit.models.harness import noise_image, smooth_image
from tests.unit.models.reference import image_processor

SIZES = [(1, 1), (17, 33), (1, 200), (512, 512), (720, 1280), (260, 340), (37, 1000), (900, 500), (1400, 1500), (4000, 90)]
HEIGHT_FIRST = [(260, 340), (37, 1000)]  # sizes for which Pillow 13 changed the order of the passes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [noise_image, smooth_image])
def test_patches_equal_the_reference(tiny: Qwen3VL, kind, size: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    if size in HEIGHT_FIRST and int(PIL.__version__.split(".")[0]) < 13:
        pytest.skip("older Pillow resizes the width first")
    image = kind(*size)
    _, rows, columns = grid = tiny.config.geometry.grid(*size)
    patches_PX = torch.empty(rows * columns, 3 * 16 * 16)
    tiny.tower.preprocessor.write_patches(image, grid, patches_PX)
    reference = image_processor(tiny.config)(images=[Image.fromarray(image.numpy())], return_tensors="pt")
    assert reference["image_grid_thw"].tolist() == [list(grid)]
    first_frame, second_frame = reference["pixel_values"].view(-1, 3, 2, 256).unbind(2)
    assert first_frame.equal(second_frame)
    reference_pixels = ((first_frame.reshape(-1, 768) + 1) * 127.5).round() - 128
    assert patches_PX.equal(reference_pixels)


@pytest.mark.parametrize(("old", "new"), [(1, 64), (5, 256), (720, 704), (1080, 1088), (9000, 32), (33, 32), (100, 100)])
def test_taps_stay_inside_and_sum_to_one(old: int, new: int) -> None:
    first, weights = make_taps(old, new)
    assert first.min() >= 0 and first.max() < old
    last = first[:, None] + np.arange(weights.shape[1])
    assert not weights[last >= old].any()
    assert abs(weights.sum(1) - (1 << TAP_BITS)).max() <= weights.shape[1]
    assert 255 * abs(weights).astype(np.int64).sum(1).max() < 2**31 - (1 << TAP_BITS), "the sums are made in int32"
