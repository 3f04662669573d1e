"""The Triton kernels in Triton's interpreter: a small case of each in the gate, all cases in the suite `kernels`."""

import pytest

from tests.unit.models.backends.portable.interpreter import run_interpreted, starts_interpreter


@starts_interpreter
def test_a_small_case_of_each_kernel() -> None:
    run_interpreted("gate")


@starts_interpreter
@pytest.mark.kernels
def test_all_cases() -> None:
    run_interpreted("kernels", "-n", "2", "--dist", "worksteal")
