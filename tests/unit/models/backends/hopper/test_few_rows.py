"""Which products of a bfloat16 matrix the kernel of few rows computes; the kernel itself is tested in tests/gpu."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")  # next to the kernel
from models.kernels.hopper import few_rows
from models.kernels.stream import Residual, RowClass
from models.weights.matrix import Matrix


def test_few_tokens_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, gated: bool = False, adds: bool = False) -> torch.Tensor:
        calls.append((gated, adds, out.dtype))
        product = x.float() @ weight.float().t()
        if gated:
            gate, up = product.chunk(2, dim=1)
            product = F.silu(gate) * up
        return out.copy_(out + product if adds else product)

    monkeypatch.setattr(few_rows, "multiply", multiply)
    weight, x, stream = (torch.randn(shape).bfloat16() for shape in ((1024, 64), (5, 64), (5, 1024)))
    ours, theirs = (Matrix.of(weight, backend) for backend in ("hopper", "torch"))
    streams = Residual(stream.clone()), Residual(stream)
    for matrix, own in zip((ours, theirs), streams, strict=True):
        matrix.add_to(own, x, RowClass.HANDFUL)
    pairs = [(streams[0].sum_TD, streams[1].sum_TD)]
    pairs += [
        (getattr(ours, name)(x, RowClass.HANDFUL), getattr(theirs, name)(x, RowClass.HANDFUL))
        for name in ("product", "swiglu", "product_f32")
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    given = torch.empty((5, 1024), dtype=torch.bfloat16)
    assert ours.product(x, RowClass.HANDFUL, given) is given and given.equal(pairs[1][0])
    half = torch.bfloat16
    assert calls == [
        (False, True, half),
        (False, False, half),
        (True, False, half),
        (False, False, torch.float32),
        (False, False, half),
    ]


@pytest.mark.parametrize(("shape", "rows"), [((1024, 64), RowClass.FEW), ((512, 64), RowClass.HANDFUL), ((1024, 96), RowClass.HANDFUL)])
def test_others_do_not(shape: tuple[int, int], rows: RowClass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "multiply", None)
    weight, x = torch.randn(shape).bfloat16(), torch.randn((3, shape[1])).bfloat16()
    assert Matrix.of(weight, "hopper").product(x, rows).equal(x @ weight.t())
