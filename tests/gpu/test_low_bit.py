"""Products of low-bit matrices at the sizes of 8B on one GPU, by humming-kernels and our kernel of one token, against plain torch."""

import itertools
from dataclasses import replace

import pytest
import torch

from models.config.formats import MatrixFormat
from models.kernels.backend import Backend
from models.kernels.ops import Experts
from models.kernels.reference.moe import sparse_swiglu as torch_sparse_swiglu
from models.kernels.reference.ops import TorchOps
from models.kernels.stream import Residual, RowClass
from models.weights.matrix import Matrix, Place

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(600)]

DEVICE = torch.device("cuda")
BACKEND = "hopper" if torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0) else "portable"
FORMATS = ("int4-g128", "int4-g32-zeros", "int4-g0", "int8-g0", "float8-g0", "float4-g16")


def random_matrix(rows: int, columns: int, format: str, generator: torch.Generator, backend: str = BACKEND, count: int = 1) -> Matrix:
    matrix = Matrix.empty(rows, columns, MatrixFormat(format, format), Place(backend, DEVICE, torch.bfloat16), count)
    matrix.storage.fill_normal_(columns**-0.5, generator)
    spread = torch.empty(matrix.storage.scales.shape, device=DEVICE).uniform_(0.5, 2, generator=generator)
    matrix.storage.scales.copy_(matrix.storage.scales.float() * spread)
    if matrix.storage.zeros is not None:
        matrix.storage.zeros.random_(-(1 << 31), (1 << 31) - 1, generator=generator)
    return matrix


SHAPES = ((6144, 4096), (24576, 4096), (4096, 12288), (256, 896))  # one or two chunks ahead; chunks that the warps do not share evenly
CASES = [*itertools.product(("int4-g128", "int4-g128-zeros"), SHAPES), *itertools.product(("int4-g64-zeros", "int4-g32"), SHAPES[2:])]


@pytest.mark.parametrize("format, shape", CASES)
def test_a_token_is_multiplied_with_norm_gate_and_residual(format: str, shape: tuple[int, int]) -> None:
    rows, columns = shape
    generator = torch.Generator(DEVICE).manual_seed(1)
    ours = random_matrix(rows, columns, format, generator)
    values_NK = ours.storage.dequantized()
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


# 8B's qkv; 27B's in_proj and gates as one matrix, whose rows humming pads, like columns
MATRICES = [*((format, 6144, 4096) for format in FORMATS), ("int4-g128-zeros", 16_480, 5120), ("int4-g32", 1288, 800)]
CLASSES = [(each, RowClass.of(each)) for each in (1, 3, 32, 64, 300, 500)]


@pytest.mark.parametrize("format, height, width", MATRICES)
def test_products_are_those_of_plain_torch(format: str, height: int, width: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    ours = random_matrix(height, width, format, generator, "portable")
    values_NK = ours.storage.dequantized()
    ours.finish()
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


EXPERTS = [
    ("int4-g128", 768, False), ("int4-g128-zeros", 512, True), ("int8-g128", 256, False), ("int4-g64", 192, False),
    ("float4-g16", 768, False), ("float8-g0", 192, False),
]  # fmt: skip


@pytest.mark.parametrize("format, inner, has_shared", EXPERTS)
def test_experts_are_those_of_plain_torch(backend: Backend, format: str, inner: int, has_shared: bool) -> None:
    generator, count = torch.Generator(DEVICE).manual_seed(1), 128 + has_shared
    shapes = (count * 2 * inner, 2048), (count * 2048, inner)
    gate_up, down = (random_matrix(*shape, format, generator, backend=backend.name, count=count) for shape in shapes)
    router = torch.randn((128 + 8 * has_shared, 2048), generator=generator, dtype=torch.bfloat16, device=DEVICE) * 2048**-0.5
    values = [Matrix.of(matrix.storage.dequantized().to(torch.bfloat16), "torch", "plain") for matrix in (gate_up, down)]
    plain, ones = Experts(router, *values, 0, count, 128, 8, has_shared), torch.ones(2048, dtype=torch.bfloat16, device=DEVICE)
    for matrix in (gate_up, down):
        matrix.finish()
    for num_tokens, first in itertools.product((1, 2, 7, 64, 200, 700, 2048), (0, 8)):
        x = torch.randn((num_tokens, 2048), generator=generator, dtype=torch.bfloat16, device=DEVICE)
        theirs, rows = replace(plain, first=first), RowClass.SINGLE if num_tokens == 1 else RowClass.MANY
        real = None if num_tokens == 1 else torch.arange(num_tokens, device=DEVICE) % 5 != 3
        ours, normed = replace(theirs, gate_up=gate_up, down=down), Residual(x).normed(ones, 1e-6)
        found, again = (backend.ops.sparse_swiglu(normed, ours, rows, real).float().sum(0) for _ in range(2))
        expected = torch_sparse_swiglu(TorchOps().norm(normed), theirs, real).float().sum(0)
        assert found.equal(again) and (found - expected).norm() < 0.02 * expected.norm(), (num_tokens, first)
        assert real is None or not found[~real].any()
