"""Sizes of steps: what the scheduler cuts, and what graphs are captured for."""

from itertools import pairwise

import pytest

from engine.wire.step_sizes import CPU, HOPPER, PORTABLE, StepSizes, step_sizes


@pytest.mark.parametrize("sizes", [HOPPER, PORTABLE])
def test_every_number_of_decodes_has_a_graph_that_is_not_much_larger(sizes: StepSizes) -> None:
    for limit in (1, 3, 100, 128, 129, 300):
        found = sizes.graph_sizes(limit)
        assert found == sorted(set(found)) and limit <= found[-1] < limit + sizes.large_step
        assert all(later - size <= max(8, sizes.large_step * (size >= 128)) for size, later in pairwise(found))
    assert not CPU.graph_sizes(300)


def test_sizes_of_steps_with_prompts() -> None:
    sizes = HOPPER
    assert [sizes.smallest_step(count) for count in (1, sizes.cheap + 1, 10_000)] == [sizes.cheap, 216, sizes.mixed[-1]]
    assert [sizes.largest_step(count) for count in (1, 320, 10_000)] == [0, 312, sizes.mixed[-1]]


def test_an_h20_has_no_sizes_of_an_h200() -> None:
    cases = ("hopper", 132), ("hopper", 78), ("portable", 132), ("torch", 0)
    assert [step_sizes(*case) for case in cases] == [HOPPER, PORTABLE, PORTABLE, CPU]
