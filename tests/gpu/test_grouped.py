"""Products of low-bit matrices at the sizes of 8B on one GPU, by our kernels and by humming-kernels, against plain torch."""

import importlib.util
import itertools

import pytest
import torch

from models.config.formats import MatrixFormat
from models.kernels.stream import Residual, RowClass
from models.weights.grouped import Grouped
from models.weights.matrix import Matrix, Place

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

DEVICE = torch.device("cuda")
BACKEND = "hopper" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "portable"
FORMATS = ("int4-g128", "int4-g32-zeros", "int4-g0", "int8-g0", "float8-g0", "float4-g16")


def random_matrix(rows: int, columns: int, format: str, generator: torch.Generator, backend: str = BACKEND) -> Matrix:
    matrix = Matrix.empty(rows, columns, MatrixFormat(format, format), Place(backend, DEVICE, torch.bfloat16))
    matrix.storage.fill_normal_(columns**-0.5, generator)
    matrix.storage.scales.mul_(torch.empty(matrix.storage.scales.shape, device=DEVICE).uniform_(0.5, 2, generator=generator))
    if matrix.storage.zeros is not None:
        matrix.storage.zeros.random_(0, 16, generator=generator)
    return matrix


SHAPES = ((6144, 4096), (24576, 4096), (4096, 12288), (256, 896))  # one or two chunks ahead; chunks that the warps do not share evenly
CASES = [*itertools.product(("int4-g128", "int4-g128-zeros"), SHAPES), *itertools.product(("int4-g64-zeros", "int4-g32"), SHAPES[2:])]


@pytest.mark.parametrize("format, shape", CASES)
def test_a_token_is_multiplied_with_norm_gate_and_residual(format: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator(DEVICE).manual_seed(1)
    ours = random_matrix(rows, columns, format, generator)
    plain = ours.on("torch")
    values_NK = plain.storage.dequantized()
    ours.finish()
    x, weight = (torch.randn(size, dtype=torch.bfloat16, device=DEVICE, generator=generator) for size in ((1, columns), (columns,)))
    for norm_weight in (weight, weight.float()):
        normed_f32 = x.float() * torch.rsqrt(x.float().square().mean() + 1e-6) * weight.float()
        expected = normed_f32 @ values_NK.t()
        normed = Residual(x.clone()).normed(norm_weight, 1e-6)
        found = ours.product(normed, RowClass.SINGLE).float()
        assert (found - expected).norm() < 0.01 * expected.norm()
        gate, up = expected.chunk(2, 1)
        expected, found = torch.nn.functional.silu(gate) * up, ours.swiglu(normed, RowClass.SINGLE)
        assert (found.float() - expected).norm() < 0.02 * expected.norm()
    before = torch.randn((1, rows), dtype=torch.bfloat16, device=DEVICE, generator=generator)
    residual, expected = Residual(before.clone()), before.float() + x.float() @ values_NK.t()
    ours.add_to(residual, x, RowClass.SINGLE)
    assert residual.parts_STD is None
    assert (residual.sum_TD.float() - expected).norm() < 0.01 * expected.norm()


# 8B's qkv; 27B's in_proj and its gates as one matrix, whose rows humming pads; neither kernel's tiles
MATRICES = [*((format, 6144, 4096) for format in FORMATS), ("int4-g128-zeros", 16_480, 5120), ("int4-g32", 1000, 5120)]
CLASSES = ((1, RowClass.SINGLE), (3, RowClass.FEW), (64, RowClass.FEW), (100, RowClass.SOME), (300, RowClass.SEVERAL), (500, RowClass.MANY))


@pytest.mark.parametrize("is_prepared", [False, True])
@pytest.mark.parametrize("format, height, width", MATRICES)
def test_products_are_those_of_plain_torch(format: str, height: int, width: int, is_prepared: bool) -> None:
    """Of our portable kernels, and of humming-kernels for integers that are prepared."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    ours = random_matrix(height, width, format, generator, "portable")
    values_NK = ours.storage.dequantized()
    if is_prepared:
        ours.finish()
        is_library = importlib.util.find_spec("humming") is not None and format.startswith("int")
        assert isinstance(ours.storage, Grouped) != is_library
    for num_tokens, rows in CLASSES:
        x, start = (torch.randn((num_tokens, size), dtype=torch.bfloat16, device=DEVICE, generator=generator) for size in (width, height))
        expected, residual = x.float() @ values_NK.t(), Residual(start.clone())
        gate, up = expected.chunk(2, 1)
        ours.add_to(residual, x, rows)
        total = residual.sum_TD.float() + (0 if residual.parts_STD is None else residual.parts_STD.float().sum(0))
        pairs = {
            "product": (ours.product(x, rows).float(), expected),
            "swiglu": (ours.swiglu(x, rows).float(), torch.nn.functional.silu(gate) * up),
            "sum": (total, start.float() + expected),
        }
        for name, (found, wanted) in pairs.items():
            assert (found - wanted).norm() < 0.02 * wanted.norm(), (name, num_tokens, rows.name)
