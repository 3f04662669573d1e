"""Sizes of steps: what the scheduler cuts fits the graphs that the worker has."""

import pytest

from engine import step_sizes
from engine.config import EngineConfig


@pytest.mark.parametrize(("limit", "last"), [(1, 1), (5, 8), (8, 8), (9, 72), (200, 200)])
def test_there_is_a_size_for_every_number_of_rows(limit: int, last: int) -> None:
    """Red if some number of running requests finds no graph, or if far larger ones are captured than are ever used."""
    sizes = step_sizes.sizes_up_to((1, 2, 4, 8), limit)
    assert sizes[-1] == last and sizes[-1] - limit < step_sizes.LARGE_STEP and sizes == sorted(set(sizes))


@pytest.mark.parametrize("num_decodes", range(1, 400, 7))
def test_a_chunk_and_its_decodes_fill_a_graph_that_pays(num_decodes: int) -> None:
    """Red if the default chunk beside so many decodes is padded, or if a graph has an odd number of rows."""
    rows = step_sizes.padded_decodes(num_decodes)
    assert num_decodes <= rows < num_decodes + step_sizes.LARGE_STEP
    sizes = step_sizes.chunk_sizes(rows)
    assert sizes == sorted(set(sizes)) and sizes[-1] == step_sizes.LARGEST_CHUNK
    assert all(size + rows in step_sizes.MIXED_STEP_SIZES for size in sizes if size not in (*step_sizes.SMALL_CHUNKS, sizes[-1]))
    if rows <= 128:
        assert EngineConfig().mixed_step_tokens - rows in sizes


def test_sizes_around_a_number_of_tokens() -> None:
    assert [step_sizes.largest_step(count) for count in (0, 103, 104, 527, 528, 5000)] == [0, 0, 104, 480, 528, 1024]
    assert [step_sizes.smallest_step(count) for count in (0, 208, 217, 528, 529, 5000)] == [208, 208, 256, 528, 624, 1024]
