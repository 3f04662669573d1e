"""The plan of our attention of tiles; `test_attention.py` runs it."""

from collections import defaultdict

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from models.kernels.hopper.tile_plan import num_blocks_of, plan_items
from models.kernels.work_items import max_token_groups, token_groups
from tests.unit.models.backends.hopper.attention_step import layout_of

ROWS = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 3000)), min_size=1, max_size=9)  # new tokens, those cached before


def tiles_of(rows: list[tuple[int, int]], size: int) -> npt.NDArray[np.int32]:
    return token_groups(layout_of(rows), size)


def block_costs(items: npt.NDArray[np.int32], start: int) -> list[int]:
    num_blocks = num_blocks_of(items)
    costs = items[1:, 6] - items[1:, 5] + start * (items[1:, 6] > 0)
    return [int(costs[block::num_blocks].sum()) for block in range(num_blocks)]


@given(rows=ROWS, heads=st.sampled_from([1, 2, 8]), size=st.sampled_from([8, 32, 96, 128]), num_blocks=st.integers(1, 132))
def test_every_token_has_its_keys_once(rows: list[tuple[int, int]], heads: int, size: int, num_blocks: int) -> None:
    layout, tiles = layout_of(rows), tiles_of(rows, size)
    items = plan_items(tiles, heads, 128, num_blocks)
    assert items[0].tolist() == [len(items) - 1, num_blocks, *[0] * 10] and items[1:, 1].max(initial=0) <= size
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
def test_blocks_have_equal_work_and_none_stops_early(rows: list[tuple[int, int]], size: int, num_blocks: int) -> None:
    items = plan_items(tiles_of(rows, size), 8, 128, num_blocks)
    for block in range(num_blocks):
        assert not (np.diff((items[1 + block :: num_blocks, 6] > 0).astype(int)) > 0).any()
    costs = block_costs(items, start=0)
    assert max(costs) - min(costs) <= (items[1:, 6] - items[1:, 5]).max(initial=0)
