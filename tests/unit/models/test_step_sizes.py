"""Sizes of steps: what the scheduler cuts fits the graphs that the worker has."""

import msgspec
import pytest

from models.kernels.hopper.tuned import STEP_SIZES as HOPPER_STEP_SIZES
from models.kernels.hopper.tuned import step_sizes
from models.kernels.reference.tuned import STEP_SIZES as CPU_STEP_SIZES
from models.kernels.step_sizes import StepSizes
from models.kernels.triton.tuned import STEP_SIZES as PORTABLE_STEP_SIZES

HOPPER = HOPPER_STEP_SIZES


def test_a_chunk_and_its_decodes_fill_a_graph_that_pays() -> None:
    for num_decodes in range(1, 400, 7):
        rows = HOPPER.padded_decodes(num_decodes)
        assert num_decodes <= rows < num_decodes + HOPPER.large_step
        sizes = HOPPER.chunks(rows)
        assert sizes == sorted(set(sizes)) and sizes[-1] == HOPPER.largest_chunk, num_decodes
        assert all(size + rows in HOPPER.mixed for size in sizes if size not in (*HOPPER.small_chunks, sizes[-1])), num_decodes
        assert rows > 128 or HOPPER.usual - rows in sizes, num_decodes


@pytest.mark.parametrize("sizes", [HOPPER_STEP_SIZES, PORTABLE_STEP_SIZES])
def test_a_step_that_would_wait_for_its_launches_has_a_graph(sizes: StepSizes) -> None:
    quick, slow = (sizes.for_layers(count, max_tokens=8192) for count in (50_000_000, 200_000_000))
    for rows in sizes.mixed_decodes:
        assert quick.max_prefill(rows) == (sizes.max_mixed_prefill if rows <= quick.few_decodes else sizes.largest_chunk)
        assert quick.max_prefill(rows) <= quick.chunks(rows)[-1]
        assert slow.max_prefill(rows) == sizes.max_mixed_prefill
    eager, short = msgspec.structs.replace(sizes, largest_chunk=0), sizes.for_layers(50_000_000, max_tokens=600)
    assert eager.for_layers(50_000_000, max_tokens=8192).max_prefill(128) == sizes.max_mixed_prefill
    assert all(short.max_prefill(rows) <= short.chunks(rows)[-1] for rows in sizes.mixed_decodes)


def test_an_h20_has_no_sizes_of_an_h200() -> None:
    assert [step_sizes(count) for count in (132, 78)] == [HOPPER_STEP_SIZES, PORTABLE_STEP_SIZES]


def test_without_graphs_nothing_is_padded() -> None:
    assert [CPU_STEP_SIZES.padded_decodes(count) for count in (1, 7, 100)] == [1, 7, 100] and CPU_STEP_SIZES.chunks(8) == []
