"""Comparison of two versions."""

import pytest

from bench.compare import compared, figures, is_loss, rows_of, seed_of
from bench.row import CELLS

LOAD = {"result": {"errors": [], "requests_per_s": 2.5, "tpot_ms": {"p50": 1.75, "p90": 2.0}, "output_tokens_per_s": 640.0}}
PROBE = {"points": [{"resolution": "720p", "images": count, "ttft_sent_ms": 10.0 * count} for count in (1, 8, 32)]}


def test_figures_of_each_run() -> None:
    found = {run: figures(run, LOAD if command.startswith("load") else PROBE) for run, command in CELLS.items()}
    assert found == {
        "one": {"tpot_ms": 1.75},
        "text": {"output_tokens_per_s": 640.0},
        "image": {"requests_per_s": 2.5},
        "images4": {"requests_per_s": 2.5},
        "probe": {f"720p x {count}, ttft_ms": 10.0 * count for count in (1, 8, 32)},
    }
    for content in ({"result": {"errors": ["503: busy"]}}, {"points": [{"resolution": "720p", "images": 8, "error": "503: busy"}]}):
        with pytest.raises(ValueError, match="503: busy"):
            figures("text", content)


def test_the_verdict_is_of_medians() -> None:
    assert is_loss({"old": [{"tpot_ms": 1.747}], "new": [{"tpot_ms": 1.960}]})
    assert not is_loss({"old": [{"tpot_ms": 1.960}], "new": [{"tpot_ms": 1.99}]})
    samples = {"old": [{"tpot_ms": 2.0}] * 3, "new": [{"tpot_ms": value} for value in (2.01, 9.0, 2.0)]}
    assert not is_loss(samples) and compared(samples)["tpot_ms"] == (2.0, 2.01, pytest.approx(-0.4975, abs=1e-3))
    assert rows_of("8B", {"one": samples}) == [["8B", "one", "tpot_ms", "2", "2.01", "-0.5 %", ""]]


def test_no_run_has_the_seed_of_another() -> None:
    assert len({seed_of(run, number) for run in CELLS.values() for number in range(9)}) == 45
