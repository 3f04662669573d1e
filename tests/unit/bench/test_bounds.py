"""Bounds of published cells, and the refusal of cells that are better."""

import pytest

from bench.bounds import Model, bound_of, checked, first_token_ms


def test_bounds_of_published_sizes() -> None:
    """Weights of 30B-A3B: 29.9 G in layers; 64 tokens choose 126 of 128 experts, so a step reads 59.5 GB besides 0.6 of the output matrix
    and 2.4 of keys."""
    mixture = Model.of("30B-A3B")
    assert 1e3 * mixture.step_s(64, 384) == pytest.approx((59.0 + 0.6 + 2.4) / 4.3, rel=0.01)
    assert bound_of(mixture, "text") == pytest.approx(4440, rel=0.01)
    assert bound_of(Model.of("8B"), "one") == pytest.approx((2 * 6.95e9 + 2 * 0.62e9 + 1164 * 147_456) / 4.3e9, rel=0.01)
    for count, published in ((1, 27), (8, 197), (32, 996)):
        assert 0.95 * published < first_token_ms(Model.of("8B"), count) < published


def test_formats_machines_and_numbers_of_gpus() -> None:
    plain, float8 = Model.of("3.5-35B-A3B"), Model.of("3.5-35B-A3B-fp8")
    assert plain.shape == float8.shape and bound_of(float8, "text") > 1.5 * bound_of(plain, "text")
    assert Model.of("8B-portable") == Model.of("8B") and Model.of("3.5-2B").shape != Model.of("2B").shape
    assert bound_of(Model.of("8B", 2), "one") == bound_of(Model.of("8B"), "one") / 2
    assert bound_of(Model.of("8B", gpu="h100"), "one") > bound_of(Model.of("8B"), "one")


def test_a_figure_better_than_its_bound_is_refused() -> None:
    for value, is_rate in ((4439.0, True), (4441.0, False)):
        assert checked("30B-A3B, text", value, 4440.0, is_rate) == value
        with pytest.raises(ValueError, match=r"30B-A3B, text: .* is better than its bound, 4440"):
            checked("30B-A3B, text", value, 4440.0, not is_rate)
