"""Sizes of steps: what the scheduler cuts, and what graphs are captured for."""

from itertools import pairwise

import pytest

from models.kernels.hopper.tuned import STEP_SIZES as HOPPER_STEP_SIZES
from models.kernels.hopper.tuned import step_sizes
from models.kernels.reference.tuned import STEP_SIZES as CPU_STEP_SIZES
from models.kernels.step_sizes import StepSizes
from models.kernels.triton.tuned import STEP_SIZES as PORTABLE_STEP_SIZES


@pytest.mark.parametrize("sizes", [HOPPER_STEP_SIZES, PORTABLE_STEP_SIZES])
def test_every_number_of_decodes_has_a_graph_that_is_not_much_larger(sizes: StepSizes) -> None:
    for limit in (1, 3, 100, 128, 129, 300):
        found = sizes.graph_sizes(limit)
        assert found == sorted(set(found)) and limit <= found[-1] < limit + sizes.large_step
        assert all(later - size <= max(8, sizes.large_step * (size >= 128)) for size, later in pairwise(found))
    assert not CPU_STEP_SIZES.graph_sizes(300)


def test_sizes_of_steps_with_prompts() -> None:
    sizes = HOPPER_STEP_SIZES
    assert [sizes.smallest_step(count) for count in (1, sizes.cheap + 1, 10_000)] == [sizes.cheap, 216, sizes.mixed[-1]]
    assert [sizes.largest_step(count) for count in (1, 320, 10_000)] == [0, 312, sizes.mixed[-1]]


def test_an_h20_has_no_sizes_of_an_h200() -> None:
    assert [step_sizes(count) for count in (132, 78)] == [HOPPER_STEP_SIZES, PORTABLE_STEP_SIZES]
