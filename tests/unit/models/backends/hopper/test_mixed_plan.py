"""How prompts and decode rows share the multiprocessors. Red when one part waits long for the other, or has none."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from models.cache.layout import AttentionLayout
from models.kernels.hopper.mixed_plan import MIXED, prefill_blocks
from models.kernels.hopper.tile_plan import TILES_TO_START, plan_items
from models.kernels.paged import Int32s
from models.kernels.work_items import token_groups
from tests.unit.models.backends.hopper.attention_step import layout_of

KV_HEADS, TILE_TOKENS, TILE_KEYS, BLOCKS = 8, 32, 128, 132  # 8B on an H200
KEYS_PER_TILE, ENOUGH = MIXED[BLOCKS]


def tiles_of(layout: AttentionLayout) -> Int32s:
    return token_groups(layout.prefill_rows(), TILE_TOKENS)


def blocks_of(layout: AttentionLayout) -> int:
    return prefill_blocks(layout, tiles_of(layout), KV_HEADS, TILE_KEYS, BLOCKS)


def times(layout: AttentionLayout, num_blocks: int) -> tuple[float, float]:
    """In tiles: the slowest block with prompts, and the decode rows on the others."""
    items = plan_items(tiles_of(layout), KV_HEADS, TILE_KEYS, num_blocks)[1:]
    costs = items[:, 6] - items[:, 5] + TILES_TO_START
    decodes = KV_HEADS * int(layout.decode_rows().kv_lens_cpu.sum()) / KEYS_PER_TILE
    return max(costs[block::num_blocks].sum() for block in range(num_blocks)), decodes / min(max(1, BLOCKS - num_blocks), ENOUGH * BLOCKS)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 20_000)), min_size=1, max_size=3),
    decodes=st.lists(st.integers(1, 5000), max_size=100),
)
def test_there_is_somebody_for_each_part(prompts: list[tuple[int, int]], decodes: list[int]) -> None:
    """Decode rows may follow; also for rows without tokens, as graphs pad with, and on GPUs that were not measured."""
    layout = layout_of(prompts, decodes)
    assert 1 <= blocks_of(layout) <= BLOCKS and (decodes or blocks_of(layout) == BLOCKS)
    assert prefill_blocks(layout, tiles_of(layout), KV_HEADS, TILE_KEYS, 78) == 78


def test_both_take_about_as_long() -> None:
    for chunk, decodes in product([(184, 0), (184, 952), (312, 700), (120, 30_000)], [[1200] * 20, [1200] * 32, [400] * 64]):
        layout = layout_of([chunk], decodes)
        best = min(max(times(layout, num_blocks)) for num_blocks in range(1, BLOCKS))
        assert max(times(layout, blocks_of(layout))) <= 1.1 * best, (chunk, len(decodes))


def test_short_prompts_are_not_cut() -> None:
    chunks = [(192, 0), (192, 600), (184, 500), (184, 952), (280, 600)]
    for chunk, decodes in product(chunks, [[1200] * 20, [1200] * 30, [400] * 64]):
        layout = layout_of([chunk], decodes)
        items = plan_items(tiles_of(layout), KV_HEADS, TILE_KEYS, blocks_of(layout))
        assert (items[1:, 10] == 1).all(), (chunk, len(decodes))


def test_prompts_alone_have_all() -> None:
    assert blocks_of(layout_of([(8192, 0)], [])) == BLOCKS
    assert blocks_of(layout_of([(8192, 0)], [400] * 4)) > 0.95 * BLOCKS
