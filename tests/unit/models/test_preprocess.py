"""Our resize, rounding and patch order against transformers' Pillow image processor: red when a pixel moves by more than one level."""

import PIL
import pytest
import torch
from PIL import Image

from models.preprocess import MAX_BAND_PIXELS, resize, write_patches
from models.qwen3_vl import Qwen3VL
from tests.unit.models.harness import noise_image, smooth_image
from tests.unit.models.reference import image_processor

SIZES = [(1, 1), (17, 33), (1, 200), (512, 512), (720, 1280), (260, 340), (37, 1000), (900, 500), (1400, 1500)]
HEIGHT_FIRST = [(260, 340), (37, 1000)]  # sizes for which Pillow 13 changed the order of the passes


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [noise_image, smooth_image])
def test_patches_equal_the_reference_within_one_level(tiny: Qwen3VL, kind, size: tuple[int, int]) -> None:  # type: ignore[no-untyped-def]
    if size in HEIGHT_FIRST and int(PIL.__version__.split(".")[0]) < 13:
        pytest.skip("older Pillow resizes the width first")
    image = kind(*size)
    _, rows, columns = grid = tiny.config.geometry.grid(*size)
    patches_PX = torch.empty(rows * columns, 3 * 16 * 16)
    write_patches(image, grid, 16, 2, patches_PX)
    reference = image_processor(tiny.config)(images=[Image.fromarray(image.numpy())], return_tensors="pt")
    assert reference["image_grid_thw"].tolist() == [list(grid)]
    first_frame, second_frame = reference["pixel_values"].view(-1, 3, 2, 256).unbind(2)
    assert first_frame.equal(second_frame)
    levels = ((patches_PX + 0.5) / 127.5 - first_frame.reshape(-1, 768)).abs() * 127.5
    assert levels.max() < 1.01
    assert (levels > 0.5).float().mean() < 1e-4, "a rounding that differs now and then is fine, a shifted filter is not"


def test_bands_do_not_show() -> None:
    image = noise_image(5, MAX_BAND_PIXELS // 5 // 2).permute(2, 0, 1)
    wide = image.expand(3, 5, -1).repeat(1, 1, 3)  # more pixels than one band
    whole = resize(wide, 7, wide.shape[2])
    torch.testing.assert_close(whole[:, :, :1000], resize(wide[:, :, :1000].contiguous(), 7, 1000))
    torch.testing.assert_close(whole[:, :, -1000:], resize(wide[:, :, -1000:].contiguous(), 7, 1000))
