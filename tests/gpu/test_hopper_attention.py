"""Attention kernels of the Hopper backend, one by one, against torch in float64."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from models.cache.layout import AttentionLayout
from models.kernels.ops import NewHeads
from models.kernels.paged import PagedAttention
from tests.gpu.test_kernels import DEVICE, close, normal
from tests.unit.models.backends.hopper.attention_step import Step

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
if IS_HOPPER:
    from models.kernels.hopper.attention import eager_attention
    from models.kernels.hopper.backend import HopperBackend
    from models.kernels.hopper.flash_decoding import Split, SplitKernel
    from models.kernels.hopper.fused_decoding import FusedDecoding
    from models.kernels.hopper.prefill_attention import Prefill, PrefillKernel
    from models.kernels.triton.text import norm_rope_store

pytestmark = [pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU"), pytest.mark.timeout(300)]


def build(lengths: list[int], heads: tuple[int, int], *arguments: int, **options: Any) -> Step:
    return Step.build(lengths, heads, *arguments, **options).with_finite_values().to(DEVICE, torch.bfloat16)


def all_close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Each token by itself: the further into a text, the smaller are values."""
    return all(close(*pair) for pair in zip(found, expected, strict=True))


def largest_pool(steps: list[Step]) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = max((step.pool for step in steps), key=lambda pool: len(pool[0]))
    return keys.clone(), values.clone()


def copy(sources: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[: len(source)] = source


ROWS = [[1] * 16, [1, 15, 16, 17, 64, 65, 1000, 5000] * 2, [20_000, *[384] * 15], [384] * 16, [2000] * 15 + [1]]
MIXED = {(9, 55, 1, 1): [28_000, 55, 700, 1], (16, 48, 1, 1): [28_000, 900, 1, 20_000], (64, 0, 1, 1): [28_000, 0, 5000, 33]}


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (64, 8), (16, 1)])
@pytest.mark.parametrize("has_chunks", [False, True])
def test_few_tokens_in_a_graph(heads: tuple[int, int], has_chunks: bool) -> None:
    """One graph for all steps of as many tokens, replayed twice each, against torch in float64; then without, as in a mixed step.
    Keys that no row owns are NaN. Chunks: 66 tokens, far into a prompt, padding and empty rows, then decode rows."""
    steps = [build(lengths, heads, 128, tokens=tokens) for tokens, lengths in MIXED.items()]
    steps = steps if has_chunks else [build(lengths, heads, 128) for lengths in ROWS]
    pool, q, num_heads = largest_pool(steps), steps[0].q.clone(), heads[0]
    kernel, graph = SplitKernel([pool], num_heads), torch.cuda.CUDAGraph()
    backend = PagedAttention([pool], [Split(kernel, len(q))], max_pages=4096)
    plan = fixed_plan(backend, steps[0].layout)
    backend.run(0, q)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = backend.run(0, q)
    for step in steps:
        copy((*step.pool, step.q), (*pool, q))
        plan(step.layout)
        graph.replay()
        first = out.clone()
        graph.replay()
        assert first.equal(out) and not kernel.arrivals_WN.any()
        expected = step.expected()
        assert all_close(first, expected)
        eager = eager_attention([step.pool], num_heads)
        eager.plan(step.layout)
        assert all_close(eager.run(0, q), expected)


FLOAT8_STEPS: list[tuple[list[int], list[int], int]] = [  # lengths, new tokens, prefill rows
    ([1, 15, 16, 17, 64, 65, 1000, 5000], [1] * 8, 0),
    ([20_000, 384, 33, 4], [1, 4, 8, 4], 0),
    ([131_072, 32_768], [1, 1], 0),
    ([28_000, 300, 700, 1], [200, 300, 1, 1], 2),
    ([40_000, 90, 700], [100, 90, 1], 2),  # more pages than are copied
]


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (64, 8), (32, 4), (16, 1)])
@pytest.mark.parametrize("page", [8, 16, 256])
def test_a_cache_in_float8(heads: tuple[int, int], page: int) -> None:
    backend = HopperBackend(DEVICE)
    for lengths, tokens, num_prefill_rows in FLOAT8_STEPS:
        step = build(lengths, heads, 128, page, tokens=tokens)
        step = replace(step, layout=replace(step.layout, num_prefill_rows=num_prefill_rows))
        pool = tuple(part.clamp(-448, 448).to(torch.float8_e4m3fn) for part in step.pool)
        expected = replace(step, pool=(pool[0].double(), pool[1].double())).expected()
        eager = backend.attention([(pool[0], pool[1])], heads[0])
        eager.plan(step.layout)
        assert all_close(eager.run(0, step.q), expected), lengths
        if not num_prefill_rows:
            make = backend.fixed_attention([(pool[0], pool[1])], heads[0], 32, 4096)
            assert make is not None
            fixed = make(32)
            fixed.plan(step.layout)
            assert all_close(fixed.run(0, step.q), expected), lengths


FEW = [1, 2, 3, 4, 5, 9, 16, 17, 33]  # query tokens of rows: around a group of tokens
DECODES = [[1, 15, 16, 17, 64, 65, 1000], [3000, *[20] * 10], [389] * 64, [5000], [40_000, 7]]


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (32, 8), (64, 8), (16, 1)])
@pytest.mark.parametrize(("page", "head_dim"), [(8, 128), (16, 128), (16, 64), (256, 128)])
def test_few_tokens(heads: tuple[int, int], page: int, head_dim: int) -> None:
    batches = [(lengths, None) for lengths in DECODES] + [([context + new for new in FEW], FEW) for context in (0, 30, 47, 600, 2000)]
    for scale, (lengths, tokens) in enumerate(batches):
        step = build(lengths, heads, head_dim, page, tokens=tokens)
        step.q *= 1 + 10 * (scale % 3)
        groups = len(step.q) + 3 * (scale % 2)
        backend = PagedAttention([step.pool], [Split(SplitKernel([step.pool], heads[0]), groups)], len(step.layout.pages))
        backend.plan(step.layout)
        first, second = backend.run(0, step.q), backend.run(0, step.q)
        assert first.equal(second)
        assert all_close(first, step.expected()), (lengths, tokens)


SINGLE = [[1], [2], [16], [17], [129], [1138], [2049], [2100], [40_000], [1, 700], [5000, 3, 16, 17]]


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (32, 8), (64, 8), (32, 4), (64, 4), (8, 2), (16, 1)])
@pytest.mark.parametrize("page", [8, 16, 256])
def test_heads_are_made_stored_and_attended_at_once(heads: tuple[int, int], page: int) -> None:
    """Against the kernel that makes and stores them and float64. The new value has an infinity, keys behind the end
    are NaN, what lies behind the pages of the last row is none, some of the same from a plan again."""
    for lengths in SINGLE:
        step = build(lengths, heads, 128, page)
        layout, (num_heads, kv_heads) = step.layout, heads
        last = torch.tensor(lengths, device=DEVICE) - 1
        slots = layout.pages[layout.page_indptr_cpu[:-1].to(DEVICE) + last // page].long() * page + last % page
        new = NewHeads(
            qkv_TX=normal(len(lengths), (num_heads + 2 * kv_heads) * 128),
            q_weight_K=1 + 0.3 * normal(128),
            k_weight_K=1 + 0.3 * normal(128),
            eps=1e-6,
            cos_sin_TK=torch.randn((len(lengths), 128), device=DEVICE).cos(),
            slots_T=slots,
        )
        new.qkv_TX[0, -5] = torch.inf
        ours, theirs = (tuple(part.clone() for part in step.pool) for _ in range(2))
        q = norm_rope_store(new, (theirs[0], theirs[1]))
        expected = replace(step, pool=(theirs[0], theirs[1]), q=q).expected()
        no_pages = layout.pages.new_full((16,), 1 << 30)
        layout = replace(layout, pages=torch.cat((layout.pages, no_pages)))
        backend = FusedDecoding([(ours[0], ours[1])], num_heads, len(lengths), len(layout.pages))
        backend.plan(layout)
        first, again = backend.run_fused(0, new), backend.run_fused(0, new)
        assert first.equal(again) and all_close(first, expected), lengths
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0.01, atol=0.01, equal_nan=True)


def fixed_plan(backend: PagedAttention, layout: AttentionLayout) -> Callable[[AttentionLayout], None]:
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
    for tokens, lengths in CHUNKS.items():
        step = build(lengths, heads, head_dim, page, tokens=tokens)
        count, pages = len(step.q), step.layout.pages
        piece = Prefill(PrefillKernel([step.pool], heads[0]), count)
        plan = torch.from_numpy(piece.plan(step.layout, [])).to(DEVICE)
        q, out = (normal(count + 100, heads[0], head_dim) for _ in range(2))
        q[50:-50], before = step.q, out.clone()
        piece.launch(0, q[50:-50], out[50:-50], plan, pages)
        assert all_close(out[50:-50], step.expected()), tokens
        assert out[:50].equal(before[:50]) and out[-50:].equal(before[-50:])
        first = out.clone()
        piece.launch(0, q[50:-50], out[50:-50], plan, pages)
        assert out.equal(first), tokens  # parts are merged in one order, whoever is last


MIXES = {(184, 0, 0): [1100, 0, 0], (100, 60, 24): [100, 3000, 24], (1, 0, 183): [9, 0, 20_000], (0, 184, 0): [0, 184, 0]}  # of prompts


@pytest.mark.parametrize("decodes", [[1200] * 20, [1] * 20, [9000, *[30] * 19], [9000, 1005, 300, 60, 1, *[0] * 15]])
def test_both_kernels_side_by_side(decodes: list[int]) -> None:
    """A step's prompts and decode rows, whose kernels overlap: what is read and written by either is never the other's or a later kernel's.
    Red if the stream goes on before both are done."""
    tokens = [8, 5, 4, 2, 1, *[0] * 15] if decodes[-1] == 0 else [1] * len(decodes)  # the former verify drafts
    for i, (new, lengths) in enumerate(MIXES.items()):
        step = build([*lengths, *decodes], (32, 8), 128, tokens=[*new, *tokens], seed=i)
        layout, q, results = replace(step.layout, num_prefill_rows=3), torch.empty_like(step.q), list[torch.Tensor]()
        attention, expected = eager_attention([step.pool], 32), step.expected()
        attention.plan(layout)
        for _ in range(20):
            q.copy_(step.q)  # ends before either kernel begins
            results.append(attention.run(0, q).clone())  # begins when both are done
            q.fill_(torch.nan)
        assert all_close(results[0], expected) and all(result.equal(results[0]) for result in results)
