"""Products of each format in the interpreter against plain torch, each kernel pinned by a class of rows."""

import itertools
import sys
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
from tests.unit.models.backends.portable.plain_humming import library as library

ROOT, CPU, SINGLE = Path(__file__).parents[5], torch.device("cpu"), TensorParallel.single()


def reference(matrix: Matrix) -> Products[Any]:
    return products_of(matrix.format, "torch")(matrix.storage, 1)


@interpreted(gate=True)
def test_every_class_of_rows_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.kernels.triton import activations, float8

    for module in (activations, float8):
        monkeypatch.setattr(module, "quantized", lambda x, *_: GroupScaled.quantized(x))  # the interpreter, no GPU, loses a carry
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
        made.storage.zeros.random_(-(1 << 31), (1 << 31) - 1)
    return made


@interpreted(gate=True)
@pytest.mark.usefixtures("library")
def test_low_bit_matrices() -> None:
    torch.manual_seed(0)
    sizes = [(format, 128, 512) for format in GROUPED] + [("int4-g32-zeros", 40, 512), ("int8-g0", 24, 72), ("float4-g16", 128, 48)]
    for (format, height, width), num_tokens in itertools.product(sizes, (1, 5)):
        norm, rows, ours = torch.rand(width) + 0.5, RowClass.of(num_tokens), low_bit(format, height, width)
        if ours.storage.factors is not None:  # several matrices are one
            ours.storage.factors[: height // 2] *= 1.5
        x, start, plain = torch.randn(num_tokens, width), torch.randn(num_tokens, height), reference(ours)
        ours.finish()
        pairs = []
        for each in (ours.products, plain):
            added = Residual(start.clone())
            each.add_to(added, x, rows)
            total = added.sum_TD + (0 if added.parts_STD is None else added.parts_STD.sum(0))
            pairs.append((each.product(Residual(x.clone()).normed(norm, 1e-6), rows), each.swiglu(x, rows), total))
        for found, expected in zip(*pairs, strict=True):
            assert float((found - expected).norm() / expected.norm()) < 0.01, (format, height, width, num_tokens)


@interpreted(gate=True)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("format", ["int4-g32", "int8-g64-zeros", "float4-g16"])
@pytest.mark.parametrize("num_tokens", [1, 5])
def test_low_bit_experts(format: str, num_tokens: int) -> None:
    """A single token, too, if only one of the matrices has a kernel for it: a slice of the other one may be too narrow."""
    from models.kernels.triton.ops import TritonOps

    torch.manual_seed(0)
    experts = Experts(torch.randn(4, 128), low_bit(format, 4 * 2 * 64, 128, 4), low_bit(format, 4 * 128, 64, 4), 0, 4, 4, 2)
    x, norm, rows = torch.randn(num_tokens, 128), torch.ones(128), RowClass.of(num_tokens)
    expected = torch_sparse_swiglu(rms_norm(x, norm, 1e-6), experts, None).sum(0)
    for matrix in (experts.gate_up, experts.down):
        matrix.finish()
    experts.gate_up.products.max_chosen = 8
    found = TritonOps().sparse_swiglu(Residual(x.clone()).normed(norm, 1e-6), experts, rows, None).sum(0)
    assert float((found - expected).norm() / expected.norm()) < 0.01


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("count", "expected"), [(1, [True]), (4, [True, False])])
def test_experts_of_several_tokens_have_no_stream_k(count: int, expected: list[bool]) -> None:
    """Red if a choice's rounding depends on its place among an expert's blocks, which varies."""
    matrix = low_bit("int4-g32", count * 64, 128, count)
    matrix.finish()
    assert len(matrix.products._kernels) == len(expected)
    assert [settings["use_stream_k"] for _, _, settings in matrix.storage.config.kernels] == expected


@pytest.mark.usefixtures("library")
def test_sizes_that_the_library_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="int8-g0 needs multiples of 8 rows and columns on every GPU, got 4 x 64"):
        low_bit("int8-g0", 4, 64).finish()


@interpreted(gate=True)
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize(("format", "limit"), [("plain", 8), ("float8", 10), ("int4-g128", 10), ("plain-adapted", 10)])
def test_an_output_projection_runs_few_files(format: str, limit: int) -> None:
    """`decoder.py`, which calls it, and the files of functions that run up to the launch."""
    from models.kernels.triton.lora import TritonLowRank
    from models.kernels.triton.ops import TritonOps

    setup, (stored, _, adapted) = Setup(SINGLE, TritonOps(), Place("portable", CPU, torch.float32)), format.partition("-adapted")
    layer = RowParallelLinear(256, 256, MatrixFormat(stored, stored), setup)
    x, residual = torch.randn(1, 256), Residual(torch.randn(1, 256))
    layer.weight.storage.fill_normal_(0.1, torch.Generator())
    layer.weight.finish()
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
