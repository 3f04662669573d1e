"""Products of low-bit matrices at the sizes of 8B on one GPU, by our kernels and by humming-kernels, against plain torch."""

import importlib.util

import pytest
import torch

from models.config.formats import MatrixFormat
from models.kernels.stream import RowClass
from models.weights.grouped import Grouped
from models.weights.matrix import Matrix, Place

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

DEVICE = torch.device("cuda")
FORMATS = ("int4-g128", "int4-g32-zeros", "int8-g0", "float8-g0", "float4-g16")


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_products_are_those_of_plain_torch(format: str, is_prepared: bool) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    ours = Matrix.empty(6144, 4096, MatrixFormat(format, format), Place("portable", DEVICE, torch.bfloat16))
    ours.storage.fill_normal_(4096**-0.5, generator)
    if ours.storage.zeros is not None:
        ours.storage.zeros.random_(5, 11, generator=generator)
    plain = ours.on("torch")
    if is_prepared:
        ours.finish()
        is_library = importlib.util.find_spec("humming") is not None and format.startswith("int")
        assert isinstance(ours.storage, Grouped) != is_library
    for num_tokens, rows in ((1, RowClass.SINGLE), (3, RowClass.FEW), (64, RowClass.FEW), (100, RowClass.SOME), (500, RowClass.MANY)):
        x = torch.randn((num_tokens, 4096), dtype=torch.bfloat16, device=DEVICE, generator=generator)
        found, expected = ours.product(x, rows).float(), plain.product(x, rows).float()
        assert (found - expected).norm() < 0.01 * expected.norm(), (num_tokens, rows.name)
