"""Which products of a bfloat16 matrix the kernel of few rows computes; the kernel itself is tested in tests/gpu."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")  # next to the kernel
from models.kernels.hopper import few_rows
from models.kernels.stream import Residual, RowClass
from models.weights.matrix import Matrix
from models.weights.plain import Plain


def test_few_tokens_take_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def multiply(x: torch.Tensor, weight: Plain, out: torch.Tensor, gated: bool = False) -> torch.Tensor:
        count = len(out) if out.dim() == 3 else 1
        calls.append((gated, count, out.dtype))
        columns = zip(x.float().chunk(count, 1), weight.values.float().chunk(count, 1), strict=True)
        products = torch.stack([part @ of_weight.t() for part, of_weight in columns])
        if gated:
            gate, up = products.chunk(2, dim=2)
            products = F.silu(gate) * up
        return out.copy_(products.view_as(out))

    monkeypatch.setattr(few_rows, "multiply", multiply)
    weight, x, stream = (torch.randn(shape).bfloat16() for shape in ((1024, 128), (5, 128), (5, 1024)))
    ours, theirs = (Matrix.of(weight, backend) for backend in ("hopper", "torch"))
    streams = Residual(stream.clone()), Residual(stream)
    for matrix, own in zip((ours, theirs), streams, strict=True):
        matrix.add_to(own, x, RowClass.FEW)
    pairs = [((streams[0].sum_TD + streams[0].settle().sum(0)).bfloat16(), streams[1].sum_TD)]
    pairs += [
        (getattr(ours, name)(x, RowClass.FEW), getattr(theirs, name)(x, RowClass.FEW)) for name in ("product", "swiglu", "product_f32")
    ]
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    given = torch.empty((5, 1024), dtype=torch.bfloat16)
    assert ours.product(x, RowClass.FEW, given) is given and given.equal(pairs[1][0])
    parts, router = few_rows.HopperOps()._logits(x, weight[:32], RowClass.FEW), weight[:32].float()
    torch.testing.assert_close(parts.sum(0), x.float() @ router.t(), rtol=1e-2, atol=1e-2)
    half = torch.bfloat16
    assert calls == [
        (False, few_rows.PARTS, torch.float32),
        (False, 1, half),
        (True, 1, half),
        (False, 1, torch.float32),
        (False, 1, half),
        (False, 2, torch.float32),
    ]


@pytest.mark.parametrize(("shape", "rows"), [((1024, 64), RowClass.SOME), ((512, 64), RowClass.FEW), ((1024, 96), RowClass.FEW)])
def test_others_do_not(shape: tuple[int, int], rows: RowClass, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(few_rows, "multiply", None)
    weight, x = torch.randn(shape).bfloat16(), torch.randn((3, shape[1])).bfloat16()
    assert Matrix.of(weight, "hopper").product(x, rows).equal(x @ weight.t())
