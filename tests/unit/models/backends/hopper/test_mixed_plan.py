"""How prompts and decode rows share the multiprocessors."""

from hypothesis import given
from hypothesis import strategies as st

from models.cache.layout import AttentionLayout
from models.kernels.hopper.mixed_plan import prefill_blocks
from models.kernels.paged import Int32s
from models.kernels.work_items import token_groups
from tests.unit.models.backends.hopper.attention_step import layout_of

KV_HEADS, TILE_TOKENS, TILE_KEYS, BLOCKS = 8, 32, 128, 132  # 8B on an H200


def tiles_of(layout: AttentionLayout) -> Int32s:
    return token_groups(layout.prefill_rows(), TILE_TOKENS)


def blocks_of(layout: AttentionLayout) -> int:
    return prefill_blocks(layout, tiles_of(layout), KV_HEADS, TILE_KEYS, BLOCKS)


@given(
    prompts=st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 20_000)), min_size=1, max_size=3),
    decodes=st.lists(st.integers(1, 5000), max_size=100),
)
def test_there_is_somebody_for_each_part(prompts: list[tuple[int, int]], decodes: list[int]) -> None:
    layout = layout_of(prompts, decodes)
    assert 1 <= blocks_of(layout) <= BLOCKS and (decodes or blocks_of(layout) == BLOCKS)
    assert prefill_blocks(layout, tiles_of(layout), KV_HEADS, TILE_KEYS, 78) == 78
