"""The CUDA operations against plain torch on the device, at the widths of every published size. Red when a shape needs what 8B does not."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from models.attention.paged import HostPlan, make_attention, plan_on_device
from models.attention.varlen import make_varlen_attention
from models.backends.ops import make_ops
from models.backends.torch.ops import TorchOps
from models.backends.torch.varlen import TorchVarlen
from models.batch import AttentionLayout
from models.layers.fp8 import BlockScaled, GroupScaled
from models.vision.preprocess import Preprocessor
from tests.gpu.generated import config_of
from tests.unit.models.backends.hopper.attention_step import Step

if torch.cuda.is_available():
    from models.backends.hopper.attention import fixed_attention_factory
    from models.backends.hopper.flash_decoding import FlashDecoding, Scratch
    from models.backends.hopper.prefill_attention import PrefillAttention  # needs Triton, which a CPU machine may lack
    from models.backends.portable import text

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"), pytest.mark.timeout(300)]

DEVICE = torch.device("cuda")
REFERENCE = TorchOps()
WIDTHS = [(2048, 6144), (2560, 9728), (4096, 12288), (5120, 25600)]  # hidden and intermediate size: 2B, 4B, 8B, 32B


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE)


def close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((ours.float() - expected.float()).norm() < 1e-2 * expected.float().norm())


@pytest.mark.parametrize(("hidden", "inner"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 2, 200, 300])
def test_products(hidden: int, inner: int, tokens: int) -> None:
    ops = make_ops(DEVICE)
    x, h, norm, residual = normal(tokens, hidden), normal(tokens, inner), normal(hidden), normal(tokens, hidden)
    gate_up, down = normal(2 * inner, hidden) * hidden**-0.5, normal(hidden, inner) * inner**-0.5
    assert close(ops.norm_linear(x, norm, 1e-6, gate_up), REFERENCE.norm_linear(x, norm, 1e-6, gate_up))
    assert close(ops.norm_swiglu(x, norm, 1e-6, gate_up), REFERENCE.norm_swiglu(x, norm, 1e-6, gate_up))
    given = torch.empty((tokens, 2 * inner), device=DEVICE)
    assert close(ops.linear(x, gate_up), REFERENCE.linear(x, gate_up))
    assert close(ops.linear_f32(x, gate_up), REFERENCE.linear_f32(x, gate_up))
    assert close(ops.linear_f32(x, gate_up, given), given) and close(given, REFERENCE.linear_f32(x, gate_up))
    check_residual(h, down, residual, norm, gate_up)


@pytest.mark.parametrize(("hidden", "inner"), WIDTHS)
@pytest.mark.parametrize("tokens", [1, 2, 17, 61, 100, 301])
def test_float8_products(hidden: int, inner: int, tokens: int) -> None:
    """Red if cuBLAS does not take a number of tokens or a width whose scales need padding, or rows of padding get into the result."""
    ops = make_ops(DEVICE)
    scale = torch.logspace(-2, 2, hidden, device=DEVICE).bfloat16()
    x, h, norm, residual = normal(tokens, hidden), normal(tokens, inner), normal(hidden), normal(tokens, hidden)
    gate_up, down = BlockScaled.quantized(normal(2 * inner, hidden) * scale), BlockScaled.quantized(normal(hidden, inner))
    assert close(ops.norm_linear(x, norm, 1e-6, gate_up), REFERENCE.norm_linear(x, norm, 1e-6, gate_up))
    assert close(ops.linear(h, down), REFERENCE.linear(h, down))
    ours, theirs = ops.norm_swiglu(x, norm, 1e-6, gate_up), REFERENCE.norm_swiglu(x, norm, 1e-6, gate_up)
    assert isinstance(theirs, torch.Tensor) and isinstance(ours, GroupScaled)
    assert close(ours.dequantized(), GroupScaled.quantized(theirs).dequantized())
    given = torch.empty((tokens, hidden), dtype=torch.bfloat16, device=DEVICE)
    assert close(ops.linear(h, down, given), given) and close(given, REFERENCE.linear(h, down))
    expected = residual.clone()
    REFERENCE.linear_add_(h, down, expected)
    addends = ops.linear_add_(h, down, residual)
    ops.rms_norm(residual, norm, 1e-6, addends)
    assert close(residual, expected)


@pytest.mark.parametrize("tokens", [1, 2, 333])
def test_rounding_to_float8(tokens: int) -> None:
    """Red if a value becomes another one than torch makes of it, or zeros become anything else."""
    x = normal(tokens, 4096) * torch.logspace(-6, 6, 4096, device=DEVICE).bfloat16()
    x[0, 128:256] = 0
    ours, theirs = text.quantized(x), GroupScaled.quantized(x)
    assert (ours.values.view(torch.uint8) != theirs.values.view(torch.uint8)).float().mean() < 1e-3  # what lies on an edge
    torch.testing.assert_close(ours.scales[:tokens], theirs.scales[:tokens], rtol=1e-6, atol=0)
    assert not ours.dequantized()[0, 128:256].any()


def check_residual(h: torch.Tensor, down: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, gate_up: torch.Tensor) -> None:
    """A product that joins the residual, and what reads it behind; then with the addends of a tensor-parallel product."""
    ops, expected = make_ops(DEVICE), residual.clone()
    REFERENCE.linear_add_(h, down, expected)
    addends = ops.linear_add_(h, down, residual)
    for ours in (addends, normal(1, *residual.shape)):
        theirs = None if ours is addends else ours
        assert close(ops.norm_linear(residual, norm, 1e-6, gate_up, ours), REFERENCE.norm_linear(expected, norm, 1e-6, gate_up, theirs))
        assert close(residual, expected)
    again = normal(1, *residual.shape)
    assert close(ops.norm_swiglu(residual, norm, 1e-6, gate_up, again), REFERENCE.norm_swiglu(expected, norm, 1e-6, gate_up, again))
    assert close(residual, expected)


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (64, 8), (16, 1)])
def test_split_attention_in_a_graph(heads: tuple[int, int]) -> None:
    """One graph for all lengths, replayed twice each; then without a graph, as in a mixed step. Keys that no row owns are NaN."""
    batches = [[1] * 16, [1, 15, 16, 17, 64, 65, 1000, 5000] * 2, [20_000, *[384] * 15], [384] * 16, [2000] * 15 + [1]]
    check_in_a_graph([Step.build(lengths, heads, head_dim=128).to(DEVICE, torch.bfloat16) for lengths in batches], max_groups=16)


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (64, 8), (16, 1)])
def test_chunks_in_a_graph(heads: tuple[int, int]) -> None:
    """As above, 66 tokens in four rows: chunks far into a prompt, with padding and empty rows, then decode rows."""
    batches = {(9, 55, 1, 1): [28_000, 55, 700, 1], (16, 48, 1, 1): [28_000, 900, 1, 20_000], (64, 0, 1, 1): [28_000, 0, 5000, 33]}
    steps = [Step.build(lengths, heads, head_dim=128, tokens=tokens).to(DEVICE, torch.bfloat16) for tokens, lengths in batches.items()]
    check_in_a_graph(steps, max_groups=66)


def check_in_a_graph(steps: list[Step], max_groups: int) -> None:
    """Steps of equally many tokens against torch in float64 and against the backend of steps outside graphs."""
    steps, num_heads = [step.with_finite_values() for step in steps], steps[0].q.shape[1]
    k_pool, v_pool = max((step.pool for step in steps), key=lambda pool: len(pool[0]))
    pool = k_pool.clone(), v_pool.clone()
    q, scratch = steps[0].q.clone(), Scratch.allocate([pool], num_heads, max_groups, max_pages=4096)
    backend, graph = FlashDecoding([pool], max_groups, scratch), torch.cuda.CUDAGraph()
    plan = fixed_plan(backend, steps[0].layout)
    backend.run(0, q)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = backend.run(0, q)
    for step in steps:
        for ours, theirs in zip((*pool, q), (*step.pool, step.q), strict=True):
            ours[: len(theirs)] = theirs
        plan(step.layout)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert first.equal(out) and not scratch.arrivals_UN.any()
        expected = step.expected()  # the further into a text, the smaller are values: each token by itself
        assert all(close(*pair) for pair in zip(first, expected, strict=True))
        eager = make_attention([step.pool], num_heads)
        eager.plan(step.layout)
        assert all(close(*pair) for pair in zip(eager.run(0, q), expected, strict=True))


FEW = [1, 2, 3, 4, 5, 9, 16, 17, 33]  # query tokens of rows: around a group of tokens
DECODES = [[1, 15, 16, 17, 64, 65, 1000], [3000, *[20] * 10], [389] * 64, [5000], [40_000, 7]]


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (32, 8), (64, 8), (16, 1)])
@pytest.mark.parametrize(("page", "head_dim"), [(8, 128), (16, 128), (16, 64), (256, 128)])
def test_few_tokens(heads: tuple[int, int], page: int, head_dim: int) -> None:
    """Decode rows of any lengths, and short chunks with any context; the same again from the same plan. Large scores do not overflow."""
    batches = [(lengths, None) for lengths in DECODES] + [([context + new for new in FEW], FEW) for context in (0, 30, 47, 600, 2000)]
    for scale, (lengths, tokens) in enumerate(batches):
        step = Step.build(lengths, heads, head_dim, page, tokens=tokens).with_finite_values().to(DEVICE, torch.bfloat16)
        step.q *= 1 + 10 * (scale % 3)
        groups = len(step.q) + 3 * (scale % 2)
        backend = FlashDecoding.factory([step.pool], heads[0], groups, len(step.layout.pages))(groups)
        backend.plan(step.layout)
        first, second = backend.run(0, step.q), backend.run(0, step.q)
        assert first.equal(second)
        assert all(close(*pair) for pair in zip(first, step.expected(), strict=True)), (lengths, tokens)


def fixed_plan(backend: HostPlan, layout: AttentionLayout) -> Callable[[AttentionLayout], None]:
    """Plans the layout for a graph. Returns what plans another one for it, in the same memory."""
    places = [torch.from_numpy(array).to(DEVICE) for array in backend.plan_arrays(layout)]
    pages = torch.zeros(4096, dtype=torch.int32, device=DEVICE)
    backend.read_from(places, pages)

    def plan(layout: AttentionLayout) -> None:
        for place, array in zip(places, backend.plan_arrays(layout), strict=True):
            place.copy_(torch.from_numpy(array))
        pages[: len(layout.pages)] = layout.pages

    plan(layout)
    return plan


CHUNKS = {
    (1,): [1],
    (300, 1, 0, 129, 32): [300, 700, 0, 1000, 4321],
    (0, 17, 128, 31): [50, 17, 128, 2063],
    (2090,): [5000],
    (200,): [20_000],  # tiles in parts, as many of those above
}


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (32, 8), (64, 8), (16, 1)])
@pytest.mark.parametrize(("page", "head_dim"), [(8, 128), (16, 128), (16, 64), (256, 128)])
def test_chunks(heads: tuple[int, int], page: int, head_dim: int) -> None:
    """Rows of any lengths, some empty, in a slice of a larger tensor, pages in any order. Neighbours in the tensor stay as they are."""
    for tokens, lengths in CHUNKS.items():
        step = Step.build(lengths, heads, head_dim, page, tokens=tokens).with_finite_values().to(DEVICE, torch.bfloat16)
        backend, count = PrefillAttention.factory([step.pool], heads[0])(), len(step.q)
        q, out = (normal(count + 100, heads[0], head_dim) for _ in range(2))
        q[50:-50], before = step.q, out.clone()
        plan_on_device(backend, step.layout)
        backend.run_into(0, q[50:-50], out[50:-50])
        assert all(close(*pair) for pair in zip(out[50:-50], step.expected(), strict=True)), tokens
        assert out[:50].equal(before[:50]) and out[-50:].equal(before[-50:])
        first = out.clone()
        backend.run_into(0, q[50:-50], out[50:-50])
        assert out.equal(first), tokens  # parts are merged in one order, whoever is last


def test_large_chunks_in_a_graph() -> None:
    """One graph for all mixes of 300 tokens in up to five rows."""
    batches = {(300, 0, 0, 0, 0): [300, 0, 0, 0, 0], (1, 200, 33, 60, 6): [20_000, 4000, 33, 61, 7], (0, 0, 0, 0, 300): [9, 0, 1, 0, 9000]}
    built = [Step.build(lengths, (32, 8), head_dim=128, tokens=tokens) for tokens, lengths in batches.items()]
    steps = [step.with_finite_values().to(DEVICE, torch.bfloat16) for step in built]
    pool = tuple(max((step.pool[i] for step in steps), key=len).clone() for i in range(2))
    backend, graph = PrefillAttention.factory([(pool[0], pool[1])], 32)(num_tokens=300, num_rows=5), torch.cuda.CUDAGraph()
    q, out = steps[0].q.clone(), torch.empty_like(steps[0].q)
    plan = fixed_plan(backend, steps[0].layout)
    backend.run_into(0, q, out)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        backend.run_into(0, q, out)
    for step in [*steps, steps[0]]:
        for ours, theirs in zip((*pool, q), (*step.pool, step.q), strict=True):
            ours[: len(theirs)] = theirs
        plan(step.layout)
        graph.replay()
        assert all(close(*pair) for pair in zip(out, step.expected(), strict=True))


MIXES = {(184, 0, 0): [1100, 0, 0], (100, 60, 24): [100, 3000, 24], (1, 0, 183): [9, 0, 20_000], (0, 184, 0): [0, 184, 0]}  # of prompts


@pytest.mark.parametrize("decodes", [[1200] * 20, [1] * 20, [9000, *[30] * 19]])
def test_both_kernels_side_by_side(decodes: list[int]) -> None:
    """A step's prompts and decode rows in one graph, whose kernels overlap: what is read and written by either is never the other's or a
    later kernel's. Red if the graph goes on before both are done."""
    tokens = [1] * len(decodes)
    built = [
        Step.build([*lengths, *decodes], (32, 8), 128, tokens=[*new, *tokens], seed=i) for i, (new, lengths) in enumerate(MIXES.items())
    ]
    steps = [step.with_finite_values().to(DEVICE, torch.bfloat16) for step in built]
    steps = [replace(step, layout=replace(step.layout, num_prefill_rows=3)) for step in steps]
    pool = tuple(max((step.pool[i] for step in steps), key=len).clone() for i in range(2))
    make = fixed_attention_factory([(pool[0], pool[1])], 32, max_prefill_rows=3, max_decode_rows=20, max_blocks=4096 // 23)
    backend, graph, q = make(184, 20, 3), torch.cuda.CUDAGraph(), torch.zeros_like(steps[0].q)
    plan, source, results = fixed_plan(backend, steps[0].layout), q.clone(), []

    def layers() -> None:
        for _ in range(4):
            q.copy_(source)  # ends before either kernel begins
            results.append(backend.run(0, q).clone())  # begins when both are done
            q.fill_(torch.nan)

    layers()
    torch.cuda.synchronize()
    results.clear()
    with torch.cuda.graph(graph):
        layers()
    for step in [*steps, *steps]:
        for ours, theirs in zip(pool, step.pool, strict=True):
            ours[: len(theirs)] = theirs
        plan(step.layout)
        source.copy_(step.q)
        for _ in range(20):
            graph.replay()
        expected = step.expected()
        assert all(close(*pair) for pair in zip(results[0], expected, strict=True)) and all(result.equal(results[0]) for result in results)
        eager = make_attention([step.pool], 32)
        eager.plan(step.layout)
        assert all(close(*pair) for pair in zip(eager.run(0, step.q), expected, strict=True))


@pytest.mark.parametrize("head_dim", [32, 64, 72])
@pytest.mark.parametrize("lengths", [[4], [256, 1000, 16, 3520], [129] * 70, [3520], [14_400, 300]])
def test_attention_inside_segments(head_dim: int, lengths: list[int]) -> None:
    """Also with tiles in parts. The same twice."""
    kvq, angles = normal(sum(lengths), 3, 16, head_dim), torch.rand((sum(lengths), head_dim // 2), device=DEVICE)
    tables = torch.cat((angles.cos(), angles.sin()), dim=-1)
    results = []
    for segments in (TorchVarlen(), make_varlen_attention(16, head_dim, DEVICE)):
        segments.plan(lengths)
        results.append(segments.run(kvq.clone(), tables))
        assert segments.run(kvq.clone(), tables).equal(results[-1])
    assert close(results[1], results[0])


def test_pixels_are_those_of_the_cpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    geometry = config_of("8B", tmp_path_factory.mktemp("8B")).geometry
    on_gpu, on_cpu = Preprocessor(geometry, make_ops(DEVICE), DEVICE), Preprocessor(geometry, REFERENCE, torch.device("cpu"))
    rng = np.random.default_rng(0)
    for _ in range(40):
        size = rng.integers(20, 1500, 2).tolist()
        image = torch.randint(256, (*size, 3), dtype=torch.uint8)
        grid = geometry.grid(*size)
        ours, expected = (torch.full((grid[1] * grid[2], 768), -1e3, dtype=torch.bfloat16, device=d) for d in (DEVICE, "cpu"))
        on_gpu.write_patches(image.to(DEVICE), grid, ours)
        on_cpu.write_patches(image, grid, expected)
        assert ours.cpu().equal(expected), size
