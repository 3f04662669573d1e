"""The plan of our prefill attention, on its own and through the kernel's arithmetic in torch; the kernel itself is tested on GPUs.

Red when a tile leaves out a token or a key, takes one twice or one too many, names a wrong page, or when blocks get unequal work.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.batch import AttentionLayout
from models.layers.prefill_plan import deal, max_items, plan_items
from tests.unit.models.attention_step import NOTHING, Step, indptr

PAGE = 16
ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=9)  # new tokens, those cached before


def layout_of(rows: list[tuple[int, int]]) -> AttentionLayout:
    lengths = [new + before for new, before in rows]
    pages = indptr([-(-length // PAGE) for length in lengths])
    ids = torch.arange(int(pages[-1])).int()
    return AttentionLayout(indptr([new for new, _ in rows]), torch.tensor(lengths).int(), pages, ids, NOTHING, len(rows))


@given(rows=ROWS, kv_heads=st.sampled_from([1, 2, 8]), tile_tokens=st.sampled_from([8, 32, 96, 128]), num_blocks=st.integers(1, 132))
def test_every_token_has_its_keys_once(rows: list[tuple[int, int]], kv_heads: int, tile_tokens: int, num_blocks: int) -> None:
    """Also for rows without tokens or without anything, as graphs pad with."""
    layout = layout_of(rows)
    items = plan_items(layout, kv_heads, tile_tokens, 128, num_blocks)
    planned = sorted(
        (first + token, head, page, end - count + 1 + token)
        for first, count, page, end, head, *_ in items[1:].tolist()
        for token in range(count)
    )
    starts, pages = layout.qo_indptr_cpu.tolist(), layout.page_indptr_cpu.tolist()
    expected = [
        (starts[row] + token, head, pages[row], before + token + 1)
        for row, (new, before) in enumerate(rows)
        for token in range(new)
        for head in range(kv_heads)
    ]
    assert planned == expected
    assert items[0].tolist() == [len(items) - 1, num_blocks, *[0] * 6] and items[1:, 1].max(initial=0) <= tile_tokens
    assert len(items) - 1 <= max_items(starts[-1], len(rows), kv_heads, tile_tokens)


@given(rows=ROWS, tile_tokens=st.sampled_from([8, 32]), num_blocks=st.integers(1, 132))
def test_blocks_have_equal_work(rows: list[tuple[int, int]], tile_tokens: int, num_blocks: int) -> None:
    costs = -(-plan_items(layout_of(rows), 8, tile_tokens, 128, num_blocks)[1:, 3] // 128)
    sums = [costs[block::num_blocks].sum() for block in range(num_blocks)]
    assert max(sums) - min(sums) <= costs.max(initial=0)


@pytest.mark.parametrize(("new", "length", "waste"), [(8192, 8192, 0.01), (2090, 15500, 0.01), (3640, 27500, 0.05), (8192, 100_000, 0.05)])
def test_few_blocks_wait_for_the_last(new: int, length: int, waste: float) -> None:
    """8B on an H200: 2,090 tokens are four rounds, not five."""
    costs = -(-plan_items(layout_of([(new, length - new)]), 8, 32, 128, 132)[1:, 3] // 128)
    assert max(costs[block::132].sum() for block in range(132)) < (1 + waste) * costs.sum() / 132


def test_rounds_go_back_and_forth() -> None:
    assert deal(11, 4).tolist() == [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10]
    assert deal(8, 4).tolist() == [3, 2, 1, 0, 4, 5, 6, 7]
    assert deal(3, 4).tolist() == [0, 1, 2] and deal(0, 4).tolist() == []


def attend(step: Step, tile_rows: int, tile_keys: int, num_blocks: int) -> torch.Tensor:
    """`prefill_attention.cu`, step by step: tiles of rows, tiles of keys from the last to the first. What it does not write is NaN."""
    layout, (k_pool, v_pool) = step.layout.prefill_rows(), step.pool
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    group = step.q.shape[1] // kv_heads
    items = plan_items(layout, kv_heads, tile_rows // group, tile_keys, num_blocks)
    out = torch.full_like(step.q, torch.nan)
    row_tokens = torch.arange(tile_rows) // group
    for first, count, page_offset, end, head, *_ in items[1 : 1 + items[0, 0]].tolist():
        heads = slice(head * group, (head + 1) * group)
        q = torch.zeros(tile_rows, head_dim)
        inside = step.q[first : first + tile_rows // group, heads].flatten(0, 1)
        q[: len(inside)] = inside
        top, total, values = torch.full((tile_rows, 1), -1e30), torch.zeros(tile_rows, 1), torch.zeros(tile_rows, head_dim)
        visible = end - count + 1 + row_tokens
        for tile in reversed(range(-(-end // tile_keys))):
            key = tile * tile_keys + torch.arange(tile_keys)
            pages = layout.pages[page_offset + key.clamp(max=end - 1) // page_size].long()
            scores = q @ k_pool[pages, key % page_size, head].T * head_dim**-0.5
            if tile >= (end - count + 1) // tile_keys:
                scores = scores.where(key[None, :] < visible[:, None], -math.inf)
            new_top = torch.maximum(top, scores.amax(1, keepdim=True))
            weights, shrink = (scores - new_top).exp(), (top - new_top).exp()
            total, values = total * shrink + weights.sum(1, keepdim=True), values * shrink + weights @ v_pool[pages, key % page_size, head]
            top = new_top
        out[first : first + count, heads] = (values / total)[: count * group].view(count, group, head_dim)
    return out


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 2), (16, 1)])
@pytest.mark.parametrize("page", [8, 16, 64])
def test_the_kernels_arithmetic(heads: tuple[int, int], page: int) -> None:
    """Tiles of 32 rows and 32 keys, so that rows begin and end anywhere in them; decode rows behind are left alone."""
    tokens, lengths = [1, 37, 0, 100, 33, 0, 64], [1, 37, 0, 300, 200, 50, 65]
    step = Step.build(lengths, heads, page=page, tokens=tokens).with_finite_values()
    ours, expected = attend(step, tile_rows=32, tile_keys=32, num_blocks=7), step.expected()
    assert not ours.isnan().any()
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_items_are_those_of_prefill_rows() -> None:
    """Red if decode rows, which come behind, are computed twice."""
    step = Step.build([40, 30, 9], heads=(2, 1), tokens=[5, 30, 1])
    rows = replace(step.layout, num_prefill_rows=2).prefill_rows()
    assert rows.qo_indptr_cpu.tolist() == [0, 5, 35] and rows.kv_lens_cpu.tolist() == [40, 30] and len(rows.pages) == 5
    assert np.unique(plan_items(rows, 1, 8, 128, 4)[1:, 2]).tolist() == [0, 3]
