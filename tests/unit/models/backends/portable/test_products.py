"""Products of each format in the interpreter against plain torch, each kernel pinned by a class of rows."""

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from models.config.formats import MatrixFormat
from models.kernels.ops import Experts
from models.kernels.reference.moe import sparse_swiglu as torch_sparse_swiglu
from models.kernels.reference.norms import rms_norm
from models.kernels.stream import Residual, RowClass
from models.layers.linear import RowParallelLinear, Setup
from models.lora.low_rank import make_low_rank
from models.lora.matrix import AdaptedProducts, StepSlots
from models.parallel.group import TensorParallel
from models.weights.float8 import GroupScaled
from models.weights.matrix import Matrix, Place, Products, products_of
from tests.unit.models.backends.portable.interpreter import interpreted

ROOT, CPU, SINGLE = Path(__file__).parents[5], torch.device("cpu"), TensorParallel.single()


def reference(matrix: Matrix) -> Products[Any]:
    return products_of(matrix.format, "torch")(matrix.storage, 1)


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
        for each in (ours.products, reference(ours)):
            stream, added = Residual(x.clone(), parts), Residual(x.clone())
            product = each.product(stream.normed(norm, 1e-6), rows)
            if format == "float8" or rows in (RowClass.SINGLE, RowClass.MANY):
                each.add_to(added, x, rows)
            pairs.append((product, stream.sum_TD, added.sum_TD + (0 if added.parts_STD is None else added.parts_STD.sum(0))))
        for found, expected, limit in zip(*pairs, (0.15 if format == "float8" else 1e-5, 1e-6, 5e-3), strict=True):
            assert float((found - expected).norm() / expected.norm()) < limit, (format, num_tokens, rows.name, num_parts)


GROUPED = ("int4-g32", "int4-g128-zeros", "int8-g0", "int8-g64-zeros", "float8-g0", "float4-g16")


def low_bit(format: str, rows: int, columns: int, count: int = 1) -> Matrix:
    made = Matrix.empty(rows, columns, MatrixFormat(format, format), Place("portable", torch.device("cpu"), torch.float32), count)
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
        ours, x, start = low_bit(format, height, width), torch.randn(num_tokens, width), torch.randn(num_tokens, height)
        pairs = []
        for each in (ours.products, reference(ours)):
            added = Residual(start.clone())
            each.add_to(added, x, rows)
            total = added.sum_TD + (0 if added.parts_STD is None else added.parts_STD.sum(0))
            pairs.append((each.product(Residual(x.clone()).normed(norm, 1e-6), rows), each.swiglu(x, rows), total))
        for found, expected in zip(*pairs, strict=True):
            assert float((found - expected).norm() / expected.norm()) < 1e-4, (format, height, width, num_tokens, rows.name)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("format", GROUPED)
def test_the_library_gets_the_values_of_low_bit_matrices(format: str, count: int) -> None:
    """Its layout before it moves values is that of compressed-tensors."""
    from models.kernels.humming import library_tensors

    matrix = low_bit(format, 64 * count, 256, count).storage
    if matrix.factors is not None:  # one for each matrix of a checkpoint
        matrix.factors.mul_(1.5 ** (torch.arange(64 * count) // 32)[:, None])
    tensors = library_tensors(matrix, count)
    codes, scales, zeros = (
        None if (tensor := tensors.get(name)) is None else tensor.flatten(0, int(count > 1))
        for name in ("weight", "weight_scale", "zero_point")
    )
    packed = replace(matrix, scheme=replace(matrix.scheme, layout="packed"), codes=codes, scales=scales, zeros=zeros, factors=None)
    torch.testing.assert_close(packed.in_format(format).dequantized(), matrix.dequantized(), rtol=2**-8, atol=0)


@interpreted(gate=True)
@pytest.mark.parametrize("format", ["int4-g32", "int8-g64-zeros", "float4-g16"])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_low_bit_experts(format: str, num_tokens: int) -> None:
    from models.kernels.triton.ops import TritonOps

    torch.manual_seed(0)
    experts = Experts(torch.randn(4, 128), low_bit(format, 4 * 2 * 64, 128, 4), low_bit(format, 4 * 128, 64, 4), 0, 4, 4, 2)
    x, norm, rows = torch.randn(num_tokens, 128), torch.ones(128), RowClass.of(num_tokens)
    found = TritonOps().sparse_swiglu(Residual(x.clone()).normed(norm, 1e-6), experts, rows, None).sum(0)
    expected = torch_sparse_swiglu(rms_norm(x, norm, 1e-6), experts, None).sum(0)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@interpreted(gate=True)
@pytest.mark.parametrize(("format", "limit"), [("plain", 8), ("float8", 10), ("int4-g128", 10), ("plain-adapted", 10)])
def test_an_output_projection_runs_few_files(format: str, limit: int) -> None:
    """`decoder.py`, which calls it, and the files of functions that run up to the launch."""
    from models.kernels.triton.lora import TritonLowRank
    from models.kernels.triton.ops import TritonOps

    setup, (stored, _, adapted) = Setup(SINGLE, TritonOps(), Place("portable", CPU, torch.float32)), format.partition("-adapted")
    layer = RowParallelLinear(256, 256, MatrixFormat(stored, stored), setup)
    x, residual = torch.randn(1, 256), Residual(torch.randn(1, 256))
    layer.weight.storage.fill_normal_(0.1, torch.Generator())
    if adapted:
        steps, low_rank = StepSlots(), make_low_rank(2, 16, 256, ((0, 256, 0),), CPU, torch.float32)
        layer.weight.bind(AdaptedProducts(layer.weight.products, low_rank, steps, setup.ops, TritonLowRank()))
        steps.begin(torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64))
    seen = {"decoder.py"}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and f"{ROOT}/models/" in frame.f_code.co_filename:
            seen.add(frame.f_code.co_filename)

    sys.setprofile(note)
    layer.add_(residual, x, RowClass.SINGLE)
    sys.setprofile(None)
    assert 3 < len(seen) <= limit, seen
