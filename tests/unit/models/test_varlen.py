"""The tiles of the vision tower's attention on GPUs. How they are dealt and cut: `test_attention_items`; the kernel is tested on GPUs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from models.kernels.varlen import varlen_tiles

ROWS = 192


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=6))
def test_tiles_cover_every_patch_once(sizes: list[int]) -> None:
    tiles = varlen_tiles(np.asarray(sizes), ROWS).tolist()
    assert [first + row for first, count, _, _ in tiles for row in range(count)] == list(range(sum(sizes)))
    starts = np.cumsum([0, *sizes[:-1]]).tolist()
    assert {(start, length) for _, _, start, length in tiles} == set(zip(starts, sizes, strict=True))
    assert all(count <= ROWS and start <= first and first + count <= start + length for first, count, start, length in tiles)
