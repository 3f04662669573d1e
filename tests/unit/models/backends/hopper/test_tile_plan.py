"""The plan of our attention of tiles, on its own and through the kernel's arithmetic in torch; the kernels themselves are tested on GPUs.

Red when a tile leaves out a token or a key, takes one twice or one too many, names a wrong page, or when blocks get unequal work.
"""

import math
from collections import defaultdict
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.cache.layout import AttentionLayout
from models.kernels.hopper import tile_plan
from models.kernels.hopper.tile_plan import TILES_TO_START, cut_round, deal, max_items, num_blocks_of, plan_items
from models.kernels.units import max_token_groups, token_groups
from models.kernels.varlen import varlen_tiles
from tests.unit.models.backends.hopper.attention_step import NOTHING, Step, indptr

PAGE = 16
ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=9)  # new tokens, those cached before


def layout_of(rows: list[tuple[int, int]]) -> AttentionLayout:
    lengths = [new + before for new, before in rows]
    pages = indptr([-(-length // PAGE) for length in lengths])
    ids = torch.arange(int(pages[-1])).int()
    return AttentionLayout(indptr([new for new, _ in rows]), torch.tensor(lengths).int(), pages, ids, NOTHING, len(rows))


def tiles_of(rows: list[tuple[int, int]], size: int) -> npt.NDArray[np.int32]:
    return token_groups(layout_of(rows), size)


def block_costs(items: npt.NDArray[np.int32], start: int) -> list[int]:
    """Tiles of keys of each block, and so many for each item."""
    num_blocks = num_blocks_of(items)
    costs = items[1:, 6] - items[1:, 5] + start * (items[1:, 6] > 0)
    return [int(costs[block::num_blocks].sum()) for block in range(num_blocks)]


@given(rows=ROWS, heads=st.sampled_from([1, 2, 8]), size=st.sampled_from([8, 32, 96, 128]), num_blocks=st.integers(1, 132))
def test_every_token_has_its_keys_once(rows: list[tuple[int, int]], heads: int, size: int, num_blocks: int) -> None:
    """Also for rows without tokens or without anything, as graphs pad with. Parts of a tile are told who the others are."""
    layout, tiles = layout_of(rows), tiles_of(rows, size)
    items = plan_items(tiles, heads, 128, num_blocks)
    assert items[0].tolist() == [len(items) - 1, num_blocks, *[0] * 10] and items[1:, 1].max(initial=0) <= size
    assert len(items) - 1 <= max_items(len(tiles), heads, num_blocks)
    assert len(tiles) <= max_token_groups(sum(new for new, _ in rows), len(rows), size)
    planned, parts = [], defaultdict(list)
    for first, count, key, end, head, first_tile, end_tile, _, first_part, part, num_parts, _ in items[1:].tolist():
        if end_tile == 0:
            continue
        planned += [
            (first + token, head, key, end - count + 1 + token, tile) for token in range(count) for tile in range(first_tile, end_tile)
        ]
        parts[first, head].append((first_part, num_parts, part))
    starts, pages = layout.qo_indptr_cpu.tolist(), layout.page_indptr_cpu.tolist()
    expected = []
    for row, (new, before) in enumerate(rows):
        for token in range(new):
            num_tiles = -(-(before + min(new, token // size * size + size)) // 128)  # as many as the tile's last token sees
            expected += [
                (starts[row] + token, head, pages[row], before + token + 1, tile) for head in range(heads) for tile in range(num_tiles)
            ]
    assert sorted(planned) == sorted(expected)
    cut = [sorted(members) for members in parts.values() if len(members) > 1]
    assert all(members == [(members[0][0], len(members), i) for i in range(len(members))] for members in cut)
    numbers = [first_part + i for members in cut for first_part, _, i in members]
    assert len(set(numbers)) == len(numbers) and max(numbers, default=0) < 2 * num_blocks
    assert all(members[0][1] == len(members) for members in parts.values())


@given(rows=ROWS, size=st.sampled_from([8, 32]), num_blocks=st.integers(1, 132))
def test_a_block_has_no_item_behind_one_that_is_none(rows: list[tuple[int, int]], size: int, num_blocks: int) -> None:
    """Red if a block would stop early."""
    items = plan_items(tiles_of(rows, size), 8, 128, num_blocks)
    for block in range(num_blocks):
        ends = items[1 + block :: num_blocks, 6]
        assert not (np.diff((ends > 0).astype(int)) > 0).any()


@given(rows=ROWS, size=st.sampled_from([8, 32]), num_blocks=st.integers(1, 132))
def test_blocks_have_equal_work(rows: list[tuple[int, int]], size: int, num_blocks: int) -> None:
    items = plan_items(tiles_of(rows, size), 8, 128, num_blocks)
    costs = block_costs(items, start=0)
    assert max(costs) - min(costs) <= (items[1:, 6] - items[1:, 5]).max(initial=0)


@pytest.mark.parametrize(
    ("new", "length", "waste"), [(8192, 8192, 0.01), (2090, 15500, 0.01), (3681, 29441, 0.01), (930, 7400, 0.15), (200, 28_000, 0.15)]
)
def test_few_blocks_wait_for_the_last(new: int, length: int, waste: float) -> None:
    """8B on an H200. Without cuts 3,681 tokens, seven rounds and eight tiles of one token, would be eight rounds."""
    tiles = tiles_of([(new, length - new)], 32)
    costs = block_costs(plan_items(tiles, 8, 128, 132), TILES_TO_START)
    assert max(costs) < (1 + waste) * 8 * (-(-tiles[:, 3] // 128) + TILES_TO_START).sum() / 132


@pytest.mark.parametrize(("lengths", "waste"), [([3520], 0.15), ([3520] * 8, 0.02), ([8160], 0.05), ([14_400], 0.02), ([640], 1.5)])
def test_few_blocks_wait_in_the_tower(lengths: list[int], waste: float) -> None:
    tiles = varlen_tiles(np.asarray(lengths), 192)
    costs = block_costs(plan_items(tiles, 16, 112, 132), TILES_TO_START)
    assert max(costs) < (1 + waste) * 16 * (-(-tiles[:, 3] // 112) + TILES_TO_START).sum() / 132


def test_a_cut_must_pay() -> None:
    """Red if short tiles are cut: to start an item and to merge parts cost more than the keys."""
    assert cut_round(np.full(100, 5), 132)[:, 5].tolist() == [1] * 100
    assert cut_round(np.full(44, 200), 132)[:, 5].tolist() == [3] * 132
    assert cut_round(np.full(0, 1), 132).shape == (0, 6)


def test_rounds_go_back_and_forth() -> None:
    assert deal(11, 4).tolist() == [0, 1, 2, 3, 7, 6, 5, 4, 8, 9, 10]
    assert deal(8, 4).tolist() == [3, 2, 1, 0, 4, 5, 6, 7]
    assert deal(3, 4).tolist() == [0, 1, 2] and deal(0, 4).tolist() == []


def attend(step: Step, tile_rows: int, tile_keys: int, num_blocks: int) -> tuple[torch.Tensor, int]:
    """`prefill_attention.cu`, step by step: tiles of rows, tiles of keys from the last to the first, parts merged when all are there.

    What it does not write is NaN. Also returns the greatest number of parts.
    """
    layout, (k_pool, v_pool) = step.layout.prefill_rows(), step.pool
    page_size, kv_heads, head_dim = k_pool.shape[1:]
    group = step.q.shape[1] // kv_heads
    items = plan_items(token_groups(layout, tile_rows // group), kv_heads, tile_keys, num_blocks)
    out, parts = torch.full_like(step.q, torch.nan), {}
    row_tokens = torch.arange(tile_rows) // group
    for first, count, page_offset, end, head, first_tile, end_tile, _, first_part, part, num_parts, _ in items[1:].tolist():
        if end_tile == 0:
            continue
        heads = slice(head * group, (head + 1) * group)
        q = torch.zeros(tile_rows, head_dim)
        inside = step.q[first : first + tile_rows // group, heads].flatten(0, 1)
        q[: len(inside)] = inside
        top, total, values = torch.full((tile_rows, 1), -1e30), torch.zeros(tile_rows, 1), torch.zeros(tile_rows, head_dim)
        visible = end - count + 1 + row_tokens
        for tile in reversed(range(first_tile, end_tile)):
            key = tile * tile_keys + torch.arange(tile_keys)
            pages = layout.pages[page_offset + key.clamp(max=end - 1) // page_size].long()
            scores = q @ k_pool[pages, key % page_size, head].T * head_dim**-0.5
            if tile == end_tile - 1 or tile >= (end - count + 1) // tile_keys:
                scores = scores.where(key[None, :] < visible[:, None], -math.inf)
            new_top = torch.maximum(top, scores.amax(1, keepdim=True))
            weights, shrink = (scores - new_top).exp(), (top - new_top).exp()
            total, values = total * shrink + weights.sum(1, keepdim=True), values * shrink + weights @ v_pool[pages, key % page_size, head]
            top = new_top
        parts[first_part, part] = top, total, values
        members = [parts.get((first_part, i)) for i in range(num_parts)]
        if num_parts > 1 and None not in members:
            tops, totals, sums = (torch.stack(x) for x in zip(*members, strict=True))
            shrink = (tops - tops.amax(0)).exp()
            total, values = (totals * shrink).sum(0), (sums * shrink).sum(0)
        if None not in members:
            out[first : first + count, heads] = (values / total)[: count * group].view(count, group, head_dim)
    return out, int(items[:, 10].max())


@pytest.mark.parametrize(("heads", "num_blocks"), [((2, 2), 50), ((4, 2), 25), ((8, 2), 50), ((16, 1), 50)])
@pytest.mark.parametrize("page", [8, 16, 64])
def test_the_kernels_arithmetic(heads: tuple[int, int], num_blocks: int, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 rows and 8 keys, so that rows begin and end anywhere in them, and some are cut; decode rows behind are left alone."""
    monkeypatch.setattr(tile_plan, "TILES_TO_START", 0)  # small as they are, cutting them pays
    monkeypatch.setattr(tile_plan, "TILES_TO_MERGE", 0)
    tokens, lengths = [1, 37, 0, 100, 33, 0, 64], [1, 37, 0, 300, 200, 50, 65]
    step = Step.build(lengths, heads, page=page, tokens=tokens).with_finite_values()
    (ours, num_parts), expected = attend(step, tile_rows=32, tile_keys=8, num_blocks=num_blocks), step.expected()
    assert not ours.isnan().any() and num_parts > 1
    torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-5)


def test_items_are_those_of_prefill_rows() -> None:
    """Red if decode rows, which come behind, are computed twice."""
    step = Step.build([40, 30, 9], heads=(2, 1), tokens=[5, 30, 1])
    rows = replace(step.layout, num_prefill_rows=2).prefill_rows()
    assert rows.qo_indptr_cpu.tolist() == [0, 5, 35] and rows.kv_lens_cpu.tolist() == [40, 30] and len(rows.pages) == 5
    assert np.unique(plan_items(token_groups(rows, 8), 1, 128, 4)[1:, 2]).tolist() == [0, 3]
