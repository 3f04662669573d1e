"""The plan of the vision tower's attention on GPUs; the kernel itself is tested there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.layers.segments import GROUP_ROWS, plan_tiles

ROWS = 192


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=6), st.integers(1, 16), st.integers(1, 132))
def test_tiles_cover_every_patch_once(sizes: list[int], num_heads: int, num_blocks: int) -> None:
    """Red if a patch is left out or named twice, a tile reaches into the next segment, or a large one comes late or is not full."""
    lengths = np.asarray(sizes)
    tiles, num_large = plan_tiles(lengths, num_heads, num_blocks, ROWS)
    covered = [start + query + row for query, count, start, _ in tiles.tolist() for row in range(count)]
    assert sorted(covered) == list(range(lengths.sum()))
    starts = (lengths.cumsum() - lengths).tolist()
    assert {(start, length) for _, _, start, length in tiles.tolist()} == set(zip(starts, sizes, strict=True))
    assert all(query + count <= length for query, count, _, length in tiles.tolist())
    groups = -(-tiles[:, 1] // GROUP_ROWS)
    assert (groups[:num_large] == ROWS // GROUP_ROWS).all() and (groups > 0).all()


@pytest.mark.parametrize(
    ("lengths", "rounds"),
    [([3520], (3, 3, 1)), ([3520] * 2, (3, 3, 3, 3, 2)), ([8160], (3, 3, 3, 3, 3, 1)), ([3520] * 4, (*[3] * 9, 1)), ([640], (2,))],
)
def test_the_last_round_is_short(lengths: list[int], rounds: tuple[int, ...]) -> None:
    """Red if blocks wait for a few that have a large tile more: groups of the largest tile of each round, 16 heads on 132 blocks."""
    tiles, num_large = plan_tiles(np.asarray(lengths), 16, 132, ROWS)
    groups = -(-tiles[:, 1] // GROUP_ROWS)
    numbered = np.concatenate((np.tile(groups[:num_large], 16), np.tile(groups[num_large:], 16)))
    assert tuple(numbered[i : i + 132].max() for i in range(0, len(numbered), 132)) == rounds
