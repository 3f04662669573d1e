"""The CUDA operations against plain torch on the device, at the widths of every published size."""

import pytest
import torch

from models.kernels.backend import Backend
from models.kernels.reference.varlen import TorchVarlen
from models.kernels.stream import Normed, Residual, RowClass
from models.weights.float8 import GroupScaled
from models.weights.matrix import Matrix

if torch.cuda.is_available():
    from models.kernels.triton import text  # needs Triton, which a CPU machine may lack

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
EPS = 1e-6
WIDTHS = [(2048, 6144), (2560, 9728), (4096, 12288), (5120, 25600)]  # hidden and intermediate size: 2B, 4B, 8B, 32B
SMALL_WIDTHS = [(2048, 2560), (1024, 5120), (512, 12288)]  # single float8 tokens in small blocks


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((ours.float() - expected.float()).norm() < 1e-2 * expected.float().norm())


def normed(x: torch.Tensor | Residual, norm: torch.Tensor) -> Normed:
    return (x if isinstance(x, Residual) else Residual(x)).normed(norm, EPS)


def both(matrix: torch.Tensor, backend: Backend, format: str = "plain") -> tuple[Matrix, Matrix]:
    return Matrix.of(matrix, backend.name, format), Matrix.of(matrix, "torch", format)


@pytest.mark.parametrize(("hidden", "inner"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 2, 9, 64, 200, 300])
def test_products(backend: Backend, hidden: int, inner: int, tokens: int) -> None:
    x, h, norm, residual = normal(tokens, hidden), normal(tokens, inner), normal(hidden), normal(tokens, hidden)
    gate_up = both(normal(2 * inner, hidden) * hidden**-0.5, backend)
    down, rows = both(normal(hidden, inner) * inner**-0.5, backend), RowClass.of(tokens)
    given = torch.empty((tokens, 2 * inner), device=DEVICE)
    assert close(*(each.product(normed(x, norm), rows) for each in gate_up))
    assert close(*(each.swiglu(normed(x, norm), rows) for each in gate_up))
    assert close(*(each.product(x, rows) for each in gate_up))
    assert close(*(each.product_f32(x, rows) for each in gate_up))
    assert close(gate_up[0].product_f32(x, rows, given), given) and close(given, gate_up[1].product_f32(x, rows))
    check_residual(h, down, residual, norm, gate_up)


@pytest.mark.parametrize(("hidden", "inner"), [*WIDTHS, (5120, 17408), *SMALL_WIDTHS])
@pytest.mark.parametrize("tokens", [1, 2, 17, 61, 100, 301])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_float8_products(backend: Backend, hidden: int, inner: int, tokens: int, dtype: torch.dtype) -> None:
    scale, rows = torch.logspace(-2, 2, hidden, device=DEVICE).bfloat16(), RowClass.of(tokens)
    x, h, norm, residual = normal(tokens, hidden), normal(tokens, inner), normal(hidden).to(dtype), normal(tokens, hidden)
    gate_up = both(normal(2 * inner, hidden) * scale, backend, "float8")
    down = both(normal(hidden, inner), backend, "float8")
    assert close(*(each.product(normed(x, norm), rows) for each in gate_up))
    assert close(*(each.product(h, rows) for each in down))
    ours, theirs = (each.swiglu(normed(x, norm), rows) for each in gate_up)
    assert isinstance(theirs, torch.Tensor)
    if isinstance(ours, GroupScaled):
        ours, theirs = ours.dequantized(), GroupScaled.quantized(theirs).dequantized()
    assert close(ours, theirs)
    given = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=DEVICE)
    assert close(down[0].product(h, rows, given), given) and close(given, down[1].product(h, rows))
    ours, theirs = Residual(residual.clone()), Residual(residual)
    for each, stream in zip(down, (ours, theirs), strict=True):
        each.add_to(stream, h, rows)
    backend.ops.norm(normed(ours, norm))
    assert close(ours.sum_TD, theirs.sum_TD)


@pytest.mark.parametrize("tokens", [1, 2, 333])
def test_rounding_to_float8(tokens: int) -> None:
    x = normal(tokens, 4096) * torch.logspace(-6, 6, 4096, device=DEVICE).bfloat16()
    x[0, 128:256] = 0
    ours, theirs = text.quantized(x), GroupScaled.quantized(x)
    assert (ours.values.view(torch.uint8) != theirs.values.view(torch.uint8)).float().mean() < 1e-3  # what lies on an edge
    torch.testing.assert_close(ours.scales[:tokens], theirs.scales[:tokens], rtol=1e-6, atol=0)
    assert not ours.dequantized()[0, 128:256].any()


Pair = tuple[Matrix, Matrix]


def check_residual(h: torch.Tensor, down: Pair, residual: torch.Tensor, norm: torch.Tensor, gate_up: Pair) -> None:
    streams, rows = (Residual(residual.clone()), Residual(residual)), RowClass.of(len(h))
    addend, again = normal(1, *residual.shape), normal(1, *residual.shape)

    def is_close(matrices: Pair, name: str) -> bool:
        results = [getattr(each, name)(normed(stream, norm), rows) for each, stream in zip(matrices, streams, strict=True)]
        return close(*results) and close(*(stream.sum_TD for stream in streams))

    for each, stream in zip(down, streams, strict=True):
        each.add_to(stream, h, rows)
    assert is_close(gate_up, "product")
    for stream in streams:
        stream.add_(addend)
    assert is_close(gate_up, "product")
    for stream in streams:
        stream.add_(again)
    assert is_close(gate_up, "swiglu")


@pytest.mark.parametrize("head_dim", [32, 64, 72])
@pytest.mark.parametrize("lengths", [[4], [256, 1000, 16, 3520], [129] * 70, [3520], [14_400, 300]])
def test_attention_inside_segments(backend: Backend, head_dim: int, lengths: list[int]) -> None:
    kvq, angles = normal(sum(lengths), 3, 16, head_dim), torch.rand((sum(lengths), head_dim // 2), device=DEVICE)
    tables = torch.cat((angles.cos(), angles.sin()), dim=-1)
    results = []
    for segments in (TorchVarlen(), backend.varlen_attention(16, head_dim)):
        segments.plan(lengths)
        results.append(segments.run(kvq.clone(), tables))
        assert segments.run(kvq.clone(), tables).equal(results[-1])
    assert close(results[1], results[0])
