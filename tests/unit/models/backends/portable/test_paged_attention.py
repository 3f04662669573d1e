"""The Triton attention in the interpreter against torch in float64."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from models.cache.layout import AttentionLayout
from tests.unit.models.backends.hopper.attention_step import Step, indptr
from tests.unit.models.backends.portable.interpreter import in_gate, interpreted

HEADS = [(4, 4), (8, 2), (12, 2), (16, 1)]
MIXES = {  # tokens of prompts: lengths of all rows
    (): [1, 15, 16, 17, 300],
    (5, 1, 9): [5, 40, 200, 33, 1],
    (66, 9): [66, 120, 7],
    (3, 70): [99, 70],
}
SHORT = {(): [2, 3, 1, 8, 5, 8], (66, 9): [4, 1, 8, 7, 6]}  # tokens of prompts: those of rows that verify drafts


def step_of(tokens: tuple[int, ...], lengths: list[int], heads: tuple[int, int], seed: int = 0, short: Sequence[int] | None = None) -> Step:
    from dataclasses import replace

    behind = [1] * (len(lengths) - len(tokens)) if short is None else short
    step = Step.build(lengths, heads, 16, 16, tokens=[*tokens, *behind], seed=seed).with_finite_values()
    return replace(step, layout=replace(step.layout, num_prefill_rows=len(tokens)))


def small_tiles() -> object:
    from models.kernels.triton.tuned import AttentionTiles, Tiles

    return AttentionTiles(Tiles(32, 32, 4, 1), Tiles(16, 16, 4, 1), blocks=6)


@interpreted
@pytest.mark.parametrize(
    ("tokens", "heads", "context"),
    [
        *((*case, None) for case in zip(MIXES, HEADS, strict=True)),
        *(((), (4, 4), 0), ((), (16, 1), 250), ((66, 9), (12, 2), 0), ((66, 9), (8, 2), 250)),
    ],
)
def test_any_mix(tokens: tuple[int, ...], heads: tuple[int, int], context: int | None) -> None:
    from models.kernels.triton.paged_attention import eager_attention

    short = None if context is None else SHORT[tokens]
    lengths = MIXES[tokens] if short is None or context is None else [*tokens, *(context + count for count in short)]
    step = step_of(tokens, lengths, heads, short=short)
    attention = eager_attention([step.pool], heads[0], small_tiles())  # type: ignore[arg-type]
    attention.plan(step.layout)
    for _ in range(2):  # a run must leave its memory as it found it
        torch.testing.assert_close(attention.run(0, step.q).double(), step.expected(), rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("tokens", [pytest.param((), marks=in_gate), (66, 9)])
def test_keys_and_values_in_float8(tokens: tuple[int, ...]) -> None:
    """As of the same values in float32; what does not fit becomes the largest value, and nothing NaN."""
    from dataclasses import replace

    from models.kernels.ops import NewHeads
    from models.kernels.reference.ops import TorchOps
    from models.kernels.triton.paged_attention import copy_pages, eager_attention
    from models.kernels.triton.text import norm_rope_store

    step = step_of(tokens, MIXES[tokens], (8, 2))
    slots_T = torch.randperm(len(step.pool[0]) * 16)
    exact = (pool.to(torch.float8_e4m3fn).float() * scale for pool, scale in zip(step.pool, (0.5, 2.0), strict=True))
    new = tuple(pool.reshape(-1, 1, *pool.shape[2:])[slots_T].contiguous() for pool in exact)  # the interpreter does not round
    new[1][:2, 0, 0, :4] = torch.tensor([1e9, -torch.inf, torch.nan, 500.0])
    pools = [tuple(torch.zeros_like(pool, dtype=torch.float8_e4m3fn) for pool in step.pool) for _ in range(2)]
    qkv_TX, unrotated_TK = torch.cat((new[0].repeat(1, 1, 4, 1), *new), dim=2).flatten(1), torch.tensor([1.0] * 4 + [0.0] * 4)
    heads = NewHeads(qkv_TX, None, None, 0.0, unrotated_TK.repeat(len(slots_T), 1), slots_T, (0.5, 2.0))
    for store, pool in zip((norm_rope_store, TorchOps().norm_rope_store_), pools, strict=True):
        store(heads, pool)  # type: ignore[arg-type]
    plain = [tuple(each.float() for each in pool) for pool in pools]
    for ours, expected in zip(*plain, strict=True):
        assert ours.isfinite().all() and ours.abs().max() <= 448
        assert ours.equal(expected)
    copies, pages = (torch.zeros_like(plain[0][0]), torch.zeros_like(plain[0][1])), step.layout.pages.long()
    copy_pages(pools[0], copies, step.layout.pages)  # type: ignore[arg-type]
    assert all(copy[: len(pages)].equal(each[pages]) for copy, each in zip(copies, plain[0], strict=True))
    found = []
    for pool in (pools[0], plain[0]):
        attention = eager_attention([pool], 8, small_tiles())  # type: ignore[arg-type]
        attention.plan(replace(step.layout))
        found.append(attention.run(0, step.q))
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


@interpreted(gate=True)
def test_a_fixed_shape() -> None:
    from models.kernels.triton.paged_attention import fixed_attention_factory

    heads = (8, 2)
    for seed, short in enumerate([[1, 1, 1], [2, 1, 0], [3, 0, 0], [1, 2, 0]]):
        rng = np.random.default_rng(seed)
        lengths = [n + int(rng.integers(0, 200)) * (n > 0) for n in short]
        step = step_of((), lengths, heads, seed, short)
        attention = fixed_attention_factory([step.pool], heads[0], small_tiles(), 3, 64)(3)  # type: ignore[arg-type]
        arrays = attention.plan_arrays(step.layout)
        assert [len(array) for array in arrays] == [len(array) for array in attention.plan_arrays(empty_like(step.layout))]
        assert len(step.layout.pages) <= attention.max_pages
        pages = torch.full((attention.max_pages,), 10**6, dtype=torch.int32)
        pages[: len(step.layout.pages)] = step.layout.pages
        attention.read_from([torch.from_numpy(array) for array in arrays], pages)
        torch.testing.assert_close(attention.run(0, step.q).double(), step.expected(), rtol=1e-4, atol=1e-4)


def empty_like(layout: AttentionLayout) -> AttentionLayout:
    tokens = layout.qo_indptr_cpu.diff()
    counts = -(-tokens // 16)
    pages = torch.arange(int(counts.sum())).int()
    starts = layout.qo_indptr_cpu, tokens.int(), indptr(counts.tolist())
    return AttentionLayout(*starts, pages, layout.slot_mapping_T, layout.num_prefill_rows)
