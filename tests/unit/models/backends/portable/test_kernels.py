"""The Triton kernels in Triton's interpreter against plain torch."""

import math

import pytest
import torch

from models.kernels.ops import NewHeads, Taps
from models.kernels.reference.norms import rms_norm
from models.kernels.reference.ops import TorchOps, rotate
from models.kernels.stream import Normed, RowClass
from models.layers.rotary import inverse_frequencies
from models.vision.preprocess import make_taps
from models.weights.float8 import BlockScaled, GroupScaled
from models.weights.matrix import Matrix
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted


@interpreted
@pytest.mark.parametrize(
    ("num_heads", "kv_heads", "head_dim", "count", "is_normed", "rotated"),
    [
        pytest.param(6, 2, 16, 3, True, 16, marks=in_gate), (8, 2, 128, 37, True, 128), (4, 4, 32, 3, False, 32), (3, 1, 16, 37, False, 16),
        (16, 8, 16, 37, True, 16), (8, 2, 128, 3, False, 128), pytest.param(6, 2, 64, 3, True, 16, marks=in_gate),
        (6, 2, 64, 37, False, 16),
    ],
)  # fmt: skip
def test_norm_rope_store(num_heads: int, kv_heads: int, head_dim: int, count: int, is_normed: bool, rotated: int) -> None:
    from models.kernels.triton import text

    generator, width = torch.Generator().manual_seed(0), (num_heads + 2 * kv_heads) * head_dim
    qkv = torch.randn((count, width + (rotated < head_dim) * num_heads * head_dim), generator=generator)[:, :width]
    qkv[1, -3:] = torch.tensor([math.nan, math.inf, -math.inf])  # of the last value head: stored as 0
    weights = torch.randn(2, head_dim, generator=generator) if is_normed else (None, None)
    args = *weights, 1e-3, random_tables(count, rotated, generator), torch.randperm(40, generator=generator)[:count]
    pools = [(torch.zeros(10, 4, kv_heads, head_dim), torch.zeros(10, 4, kv_heads, head_dim)) for _ in range(2)]
    expected = TorchOps().norm_rope_store_(NewHeads(qkv.clone(), *args), pools[0])
    ours = text.norm_rope_store(NewHeads(qkv, *args), pools[1])
    assert pools[1][1].isfinite().all()
    for got, wanted in ((ours, expected), (pools[1][0], pools[0][0]), (pools[1][1], pools[0][1])):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@interpreted(gate=True)
def test_rotary_rows() -> None:
    from models.kernels.triton import text

    inv_freq = inverse_frequencies(5e6, 64)
    for count in (0, 1, 7):
        positions, axis = torch.randint(0, 262_144, (3, 9))[:, :count], torch.arange(32) % 3
        found, expected = text.rotary_rows(positions, axis, inv_freq), TorchOps().rotary_rows(positions, axis, inv_freq)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def random_tables(count: int, head_dim: int, generator: torch.Generator) -> torch.Tensor:
    angles = torch.rand((count, head_dim // 2), generator=generator) * 2 * math.pi
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


@interpreted
@pytest.mark.parametrize("head_dim", [72, 64, 32, pytest.param(16, marks=in_gate)])
def test_rotate(head_dim: int) -> None:
    from models.kernels.triton import tower

    generator = torch.Generator().manual_seed(0)
    kvq = torch.randn((5, 3, 4, head_dim), generator=generator)
    tables = random_tables(5, head_dim, generator)
    keys, values, queries = (part.clone() for part in kvq.unbind(1))
    tower.rotate_(kvq, tables)
    torch.testing.assert_close(kvq[:, 2], rotate(queries, tables), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(kvq[:, 0], rotate(keys, tables), rtol=1e-5, atol=1e-5)
    assert kvq[:, 1].equal(values)


@interpreted
@pytest.mark.parametrize(("width", "offsets"), [(1152, 1152), pytest.param(64, 16, marks=in_gate)])
def test_layer_norm(width: int, offsets: int) -> None:
    from models.kernels.triton import tower

    generator = torch.Generator().manual_seed(0)
    x = torch.randn((7, width), generator=generator) * 3 + 5
    args = [torch.randn(size, generator=generator) for size in (offsets, width, width)]
    expected = TorchOps().layer_norm(x, *args, 1e-6)
    torch.testing.assert_close(tower.layer_norm(x, *args, 1e-6), expected, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize("width", [pytest.param(64, marks=in_gate), 1500])
def test_norm_and_swiglu(width: int) -> None:
    from models.kernels.triton import text
    from models.kernels.triton.activations import values_of

    generator = torch.Generator().manual_seed(0)
    x, weight, gate_up = (torch.randn(shape, generator=generator) for shape in ((5, width), (width,), (5, 2 * width)))
    torch.testing.assert_close(values_of(Normed(x, None, weight, 1e-3)), rms_norm(x, weight, 1e-3), rtol=1e-5, atol=1e-5)
    assert values_of(Normed(x[:0], None, weight, 1e-3)).shape == (0, width)
    addends = torch.randn((3, *x.shape), generator=generator)
    for parts in (addends, addends[:1]):
        ours, theirs = x.clone(), x + parts.sum(0)
        normed = values_of(Normed(ours, parts, weight, 1e-3))
        torch.testing.assert_close((normed, ours), (rms_norm(theirs, weight, 1e-3), theirs), rtol=1e-5, atol=1e-5)
    gate, up = gate_up.chunk(2, dim=-1)
    torch.testing.assert_close(text.swiglu(gate_up), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("width", "rows"), [(512, 24), (700, 20), pytest.param(96, 2, marks=in_gate)])
def test_gemv(width: int, rows: int) -> None:
    from models.kernels.triton import gemv

    generator = torch.Generator().manual_seed(0)
    shapes = (1, width), (rows, width), (width,), (1, rows)
    x, weight, norm, residual = (torch.randn(shape, generator=generator) for shape in shapes)
    given, normed = torch.empty((1, rows)), torch.empty_like(x)
    torch.testing.assert_close(gemv.gemv(x, weight, given), x @ weight.t(), rtol=1e-4, atol=1e-4)
    for kept in (None, normed):
        ours = gemv.gemv(x, weight, given.clone(), (norm, 1e-3), normed_1D=kept)
        torch.testing.assert_close(ours, rms_norm(x, norm, 1e-3) @ weight.t(), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, rms_norm(x, norm, 1e-3), rtol=1e-5, atol=1e-5)
    ours = gemv.gemv(x, weight, torch.empty((1, rows // 2)), (norm, 1e-3), gated=True)
    torch.testing.assert_close(ours, Matrix.of(weight, "torch").swiglu(rms_norm(x, norm, 1e-3), RowClass.SINGLE), rtol=1e-4, atol=1e-3)
    expected = residual + x @ weight.t()
    gemv.gemv(x, weight, residual, adds=True)
    torch.testing.assert_close(residual, expected, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize(("num_tokens", "width"), [(3, 512), (1, 1152), pytest.param(5, 256, marks=in_gate)])
def test_what_is_rounded_to_float8(num_tokens: int, width: int) -> None:
    from models.kernels.triton import activations, text

    torch.manual_seed(0)
    x, weight = torch.randn((num_tokens, width)) * torch.logspace(-3, 3, num_tokens * width).view(num_tokens, width), torch.randn(width)
    x[0, :128] = 0
    gate, up = torch.randn((2, num_tokens, width))
    addends = torch.randn((2, num_tokens, width))
    normed, added, again = rms_norm(x + addends.sum(0), weight, 1e-3), x.clone(), x.clone()
    values, both = activations.inputs_of_experts(Normed(again, addends, weight, 1e-3), True, counts := torch.ones(9, dtype=torch.int32))
    assert isinstance(both, GroupScaled) and not counts.any()
    torch.testing.assert_close(values, normed, rtol=1e-5, atol=1e-5)
    for ours, expected in (
        (text.quantized(x), x),
        (activations.rounded(Normed(added, addends, weight, 1e-3)), normed),
        (both, normed),
        (text.swiglu_quantized(torch.cat((gate, up), 1)), torch.nn.functional.silu(gate) * up),
    ):
        theirs = GroupScaled.quantized(expected)
        torch.testing.assert_close(ours.scales[:num_tokens], theirs.scales[:num_tokens], rtol=1e-5, atol=0)
        differs = ours.values.view(torch.uint8) != theirs.values.view(torch.uint8)
        assert differs.float().mean() < 0.03  # the interpreter, not a GPU, loses a carry: it makes 64 of 126
    torch.testing.assert_close(added, x + addends.sum(0), rtol=1e-6, atol=1e-6)


@interpreted
@pytest.mark.parametrize(
    ("num_tokens", "width", "rows"),
    [(1, 512, 128), (17, 640, 256), (70, 1536, 128), pytest.param(2, 256, 128, marks=in_gate), (140, 256, 128)],
)
def test_few_tokens_times_float8(num_tokens: int, width: int, rows: int) -> None:
    from models.kernels.triton import float8

    torch.manual_seed(0)
    weight = BlockScaled.quantized(torch.randn((rows, width)) * torch.logspace(-2, 2, rows * width).view(rows, width))
    x = GroupScaled.quantized(torch.randn((num_tokens, width)) * torch.logspace(2, -2, num_tokens * width).view(num_tokens, width))
    expected = x.dequantized() @ weight.dequantized().t()
    torch.testing.assert_close(float8.multiply(x, weight, torch.float32), expected, rtol=1e-3, atol=1e-2)
    parts = float8.multiply_in_parts(x, weight, torch.empty)
    assert len(parts) == {512: 4, 1536: 4, 640: 1, 256: 2}[width]
    torch.testing.assert_close(parts.sum(0), expected, rtol=1e-3, atol=1e-2)


@interpreted(gate=True)
def test_gemv_of_a_long_vector(monkeypatch: pytest.MonkeyPatch) -> None:
    from models.kernels.triton import gemv
    from models.kernels.triton.tuned import GemvTiles

    monkeypatch.setattr(gemv, "gemv_tiles", lambda *_: GemvTiles(4, 64))
    x, weight = torch.randn((1, 200)), torch.randn((22, 200))
    torch.testing.assert_close(gemv.gemv(x, weight, torch.empty(1, 22)), x @ weight.t(), rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize(
    ("size", "axis", "new"),
    [((40, 32), 0, 64), ((40, 32), 1, 64), ((300, 32), 0, 32), pytest.param((32, 50), 1, 32, marks=in_gate), ((32, 64), 0, 32)],
)
def test_resample(size: tuple[int, int], axis: int, new: int) -> None:
    from models.kernels.triton import pixels

    image = torch.randint(256, (*size, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    first, weights = make_taps(size[axis], new)
    taps = Taps(torch.from_numpy(first), torch.from_numpy(weights))
    expected = TorchOps().resample(image, axis, taps)
    assert pixels.resample(image, axis, taps).equal(expected)
    if expected.shape[1 - axis] % 32 == 0:
        shape = (expected.numel() // 768, 768)
        ours, theirs = torch.full(shape, -1e3), torch.empty(shape)
        pixels.resample_to_patches_(image, axis, taps, 16, 2, ours)
        TorchOps().resample_to_patches_(image, axis, taps, 16, 2, theirs)
        assert ours.equal(theirs)
