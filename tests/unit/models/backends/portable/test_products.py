"""Products of each format in the interpreter against plain torch, each kernel pinned by a class of rows."""

import itertools
from dataclasses import replace

import pytest
import torch

from models.config.formats import MatrixFormat
from models.kernels.ops import Experts
from models.kernels.reference.moe import sparse_swiglu as torch_sparse_swiglu
from models.kernels.stream import Residual, RowClass
from models.weights.float8 import GroupScaled
from models.weights.grouped import Grouped
from models.weights.matrix import Matrix, Place
from tests.unit.models.backends.portable.interpreter import interpreted


@interpreted(gate=True)
def test_every_class_of_rows_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.kernels.triton import activations, float8

    for module in (activations, float8):
        monkeypatch.setattr(module, "quantized", GroupScaled.quantized)  # the interpreter, not a GPU, loses a carry when it rounds
    torch.manual_seed(0)
    weight, norm = torch.randn(256, 256) / 16, torch.rand(256) + 0.5
    for format, num_tokens, rows, num_parts in itertools.product(("plain", "float8"), (1, 3), RowClass, (0, 1, 2)):
        if num_tokens > rows:
            continue
        x, parts = torch.randn(num_tokens, 256), torch.randn(num_parts, num_tokens, 256) if num_parts else None
        ours = Matrix.of(weight, "portable", format)
        pairs = []
        for each in (ours, ours.on("torch")):
            stream, added = Residual(x.clone(), parts), Residual(x.clone())
            product = each.product(stream.normed(norm, 1e-6), rows)
            if format == "float8" or rows in (RowClass.SINGLE, RowClass.MANY):
                each.add_to(added, x, rows)
            pairs.append((product, stream.sum_TD, added.sum_TD + (0 if added.parts_STD is None else added.parts_STD.sum(0))))
        for found, expected, limit in zip(*pairs, (0.15 if format == "float8" else 1e-5, 1e-6, 5e-3), strict=True):
            assert float((found - expected).norm() / expected.norm()) < limit, (format, num_tokens, rows.name, num_parts)


GROUPED = ("int4-g32", "int4-g128-zeros", "int8-g0", "int8-g64-zeros", "float8-g0", "float4-g16")


def grouped(format: str, rows: int, columns: int) -> Matrix:
    made = Matrix.empty(rows, columns, MatrixFormat(format, format), Place("portable", torch.device("cpu"), torch.float32))
    made.storage.fill_normal_(columns**-0.5, torch.Generator().manual_seed(1))
    made.storage.scales.copy_(made.storage.scales.float() * (0.5 + torch.rand(made.storage.scales.shape)))
    if made.storage.zeros is not None:
        made.storage.zeros.random_(5, 11)
    return made


@interpreted(gate=True)
def test_low_bit_matrices() -> None:
    torch.manual_seed(0)
    classes = ((1, RowClass.SINGLE), (5, RowClass.FEW), (20, RowClass.SOME), (20, RowClass.MANY))
    cases = [(format, 128, 512, *each) for format, each in itertools.product(GROUPED, classes)]
    without_tiles = (("int4-g32-zeros", 40, 512), ("int4-g32", 128, 576), ("int8-g0", 24, 128), ("float4-g16", 128, 192))
    cases += [(*matrix, *each) for matrix, each in itertools.product(without_tiles, classes[:2])]
    for format, height, width, num_tokens, rows in cases:
        norm = torch.rand(width) + 0.5
        ours, x, start = grouped(format, height, width), torch.randn(num_tokens, width), torch.randn(num_tokens, height)
        pairs = []
        for each in (ours, ours.on("torch")):
            added = Residual(start.clone())
            each.add_to(added, x, rows)
            total = added.sum_TD + (0 if added.parts_STD is None else added.parts_STD.sum(0))
            pairs.append((each.product(Residual(x.clone()).normed(norm, 1e-6), rows), each.swiglu(x, rows), total))
        for found, expected in zip(*pairs, strict=True):
            assert float((found - expected).norm() / expected.norm()) < 1e-4, (format, height, width, num_tokens, rows.name)


@interpreted(gate=True)
def test_low_bit_experts_for_a_single_token() -> None:
    from models.kernels.triton.grouped import GroupedExperts

    torch.manual_seed(0)
    gate_up, down, x = grouped("int4-g32", 4 * 2 * 64, 128), grouped("int4-g32", 4 * 128, 64), torch.randn(1, 128)
    chosen, weights, out = torch.tensor([2, -1, 0]), torch.tensor([0.5, 0.3, 0.2]), torch.randn(1, 128)
    expected = out.clone()
    for expert, weight in zip(chosen.tolist(), weights.tolist(), strict=True):
        if expert >= 0:
            up, lower = (each.on("torch").rows(expert * 128, (expert + 1) * 128) for each in (gate_up, down))
            expected += weight * lower.product(up.swiglu(x, RowClass.MANY), RowClass.MANY)
    inner = GroupedExperts.expert_swiglu(x, gate_up.storage, chosen, 4)
    GroupedExperts.expert_sum(inner, down.storage, chosen, weights, out, adds=True)
    assert torch.allclose(out, expected, atol=1e-4)


@interpreted(gate=True)
@pytest.mark.parametrize("format", ["int4-g32", "int4-g32-zeros", "int8-g64"])
def test_low_bit_experts_for_few_tokens(format: str) -> None:
    from models.kernels.triton.moe import sparse_swiglu

    torch.manual_seed(0)
    ours = Experts(torch.randn(4, 128), grouped(format, 4 * 2 * 64, 128), grouped(format, 4 * 128, 64), 0, 4, 4, 2)
    plain = replace(ours, gate_up=ours.gate_up.on("torch"), down=ours.down.on("torch"))
    x = torch.randn(5, 128)
    found = sparse_swiglu(x, x @ ours.router_ED.t(), ours, None)
    torch.testing.assert_close(found, torch_sparse_swiglu(x, plain, None), rtol=1e-3, atol=1e-4)


@interpreted(gate=True)
def test_matrices_stay_ours_where_humming_cannot_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.kernels import humming

    tried, products, matrix = [], humming.HummingProducts(), grouped("int4-g32", 40, 256).storage

    def of(matrix: Grouped, count: int) -> None:
        tried.append(matrix.shape)
        raise RuntimeError("no suitable CUDA environment")

    monkeypatch.setattr(humming.HummingMatrix, "of", of)
    monkeypatch.setattr(humming, "takes", lambda matrix, count: True)
    assert all(products.prepared(matrix, 1) is matrix for _ in range(2)) and len(tried) == 1
    assert products.product(torch.randn(1, 256), matrix, RowClass.SINGLE, None).shape == (1, 40)
