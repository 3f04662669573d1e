"""Sizes of steps: what the scheduler cuts fits the graphs that the worker has."""

import itertools

import msgspec
import pytest

from models.kernels.hopper.tuned import STEP_SIZES as HOPPER_STEP_SIZES
from models.kernels.hopper.tuned import step_sizes
from models.kernels.reference.tuned import STEP_SIZES as CPU_STEP_SIZES
from models.kernels.step_sizes import StepSizes
from models.kernels.triton.tuned import STEP_SIZES as PORTABLE_STEP_SIZES

HOPPER = HOPPER_STEP_SIZES


@pytest.mark.parametrize(("limit", "last"), [(1, 1), (5, 8), (8, 8), (9, 72), (200, 200)])
def test_there_is_a_size_for_every_number_of_rows(limit: int, last: int) -> None:
    sizes = HOPPER.up_to((1, 2, 4, 8), limit)
    assert sizes[-1] == last and sizes[-1] - limit < HOPPER.large_step and sizes == sorted(set(sizes))


def test_a_chunk_and_its_decodes_fill_a_graph_that_pays() -> None:
    for num_decodes in range(1, 400, 7):
        rows = HOPPER.padded_decodes(num_decodes)
        assert num_decodes <= rows < num_decodes + HOPPER.large_step
        sizes = HOPPER.chunks(rows)
        assert sizes == sorted(set(sizes)) and sizes[-1] == HOPPER.largest_chunk, num_decodes
        assert all(size + rows in HOPPER.mixed for size in sizes if size not in (*HOPPER.small_chunks, sizes[-1])), num_decodes
        assert rows > 128 or HOPPER.usual - rows in sizes, num_decodes


@pytest.mark.parametrize("sizes", [HOPPER_STEP_SIZES, PORTABLE_STEP_SIZES])
def test_a_long_prompt_alone_is_padded_little(sizes: StepSizes) -> None:
    small = sizes.for_layers(50_000_000, max_tokens=8192)
    alone = small.chunks(0)
    assert alone == sorted(set(alone)) and 3072 <= alone[-1] < 3168
    for size, following in itertools.pairwise(size for size in alone if size >= sizes.largest_chunk):
        assert following - size <= max(16, size / 32)
    assert sizes.for_layers(500_000_000, max_tokens=8192).chunks(0) == sizes.chunks(0)
    slow = [sizes.for_layers(300_000_000, 8192, is_float8=i, has_states=j).chunks(0)[-1] for i in (False, True) for j in (False, True)]
    assert slow[0] < 800 and slow[1] == slow[2] in range(1533, 1600) and slow[3] >= 3066
    assert sizes.for_layers(1_000_000, max_tokens=600).chunks(0)[-1] in range(600, 632)


@pytest.mark.parametrize("sizes", [HOPPER_STEP_SIZES, PORTABLE_STEP_SIZES])
def test_a_long_chunk_beside_few_decodes_has_a_graph(sizes: StepSizes) -> None:
    small = sizes.for_layers(50_000_000, max_tokens=8192)
    twice, more = small.mixed_decodes[2:4]
    assert twice == small.few_decodes and small.chunks(twice)[-1] == sizes.mixed[-1] - twice
    assert small.chunks(more)[-1] == sizes.largest_chunk
    few, more = small.mixed_decodes[1:3]
    slower = sizes.for_layers(200_000_000, max_tokens=8192)
    assert slower.chunks(few)[-1] == sizes.mixed[-1] - few and slower.chunks(more)[-1] == sizes.largest_chunk
    assert sizes.for_layers(300_000_000, max_tokens=8192).chunks(few)[-1] <= 230_000_000_000 // 300_000_000


@pytest.mark.parametrize("sizes", [HOPPER_STEP_SIZES, PORTABLE_STEP_SIZES])
def test_a_step_that_would_wait_for_its_launches_has_a_graph(sizes: StepSizes) -> None:
    """Red if many waiting tokens make steps without a graph of a model whose layers take the host longer than the device."""
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


def test_sizes_around_a_number_of_tokens() -> None:
    assert [HOPPER.largest_step(count) for count in (0, 103, 104, 527, 528, 5000)] == [0, 0, 104, 480, 528, 1024]
    assert [HOPPER.smallest_step(count) for count in (0, 208, 217, 528, 529, 5000)] == [208, 208, 256, 528, 624, 1024]


@pytest.mark.parametrize("sizes", [HOPPER_STEP_SIZES, CPU_STEP_SIZES])
def test_sizes_ascend_and_cross_a_process_boundary(sizes: StepSizes) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sizes), type=StepSizes) == sizes
    for ascending in (sizes.mixed, sizes.decodes, sizes.mixed_decodes, sizes.small_chunks):
        assert list(ascending) == sorted(set(ascending))
    assert sizes.cheap <= sizes.usual <= sizes.usual_sparse and {sizes.cheap, sizes.usual, sizes.usual_sparse} <= set(sizes.mixed)
    assert sizes.for_layers(1, max_tokens=64, is_sparse=True).usual == sizes.usual_sparse


def test_without_graphs_nothing_is_padded() -> None:
    assert [CPU_STEP_SIZES.padded_decodes(count) for count in (1, 7, 100)] == [1, 7, 100] and CPU_STEP_SIZES.chunks(8) == []
