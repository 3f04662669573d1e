"""Comparison of two versions of the engine."""

from pathlib import Path
from typing import Any

import pytest

from bench import compare
from bench.compare import FIGURE, RUNS, compared, engine_flags, figures, gain, is_loss, main, rows_of

LOAD = {"result": {"errors": [], "requests_per_s": 2.5, "tpot_ms": {"p50": 1.75, "p90": 2.0}, "output_tokens_per_s": 640.0}}
PROBE = {"points": [{"resolution": "720p", "images": count, "ttft_sent_ms": 10.0 * count} for count in (1, 8, 32)]}


def test_figures_of_each_run() -> None:
    found = {run: figures(run, LOAD if run in FIGURE else PROBE) for run in RUNS}
    assert found == {
        "one": {"tpot_ms": 1.75},
        "text": {"output_tokens_per_s": 640.0},
        "image": {"requests_per_s": 2.5},
        "probe": {f"720p x {count}, ttft_ms": 10.0 * count for count in (1, 8, 32)},
    }
    for content in ({"result": {"errors": ["503: busy"]}}, {"points": [{"resolution": "720p", "images": 8, "error": "503: busy"}]}):
        with pytest.raises(ValueError, match="503: busy"):
            figures("text", content)


def test_a_gain_is_positive_for_rates_and_for_times() -> None:
    assert gain("requests_per_s", 10.0, 11.0) == pytest.approx(10) and gain("tpot_ms", 11.0, 10.0) == pytest.approx(10)
    assert gain("requests_per_s", 10.0, 9.0) == pytest.approx(-10) and gain("720p x 8, ttft_ms", 9.0, 10.0) == pytest.approx(-10)


def test_the_verdict_is_of_medians() -> None:
    """12 % is a loss; 1.5 % is none, and neither is one slow round of three."""
    assert is_loss({"old": [{"tpot_ms": 1.747}], "new": [{"tpot_ms": 1.960}]})
    assert not is_loss({"old": [{"tpot_ms": 1.960}], "new": [{"tpot_ms": 1.99}]})
    samples = {"old": [{"tpot_ms": 2.0}] * 3, "new": [{"tpot_ms": value} for value in (2.01, 9.0, 2.0)]}
    assert not is_loss(samples) and compared(samples)["tpot_ms"] == (2.0, 2.01, pytest.approx(-0.4975, abs=1e-3))
    assert rows_of("8B", {"one": samples}) == [["8B", "one", "tpot_ms", "2", "2.01", "-0.5 %", ""]]


def test_published_sizes_have_dummy_weights(tmp_path: Path) -> None:
    assert "dummy" in engine_flags("Qwen3-VL-8B", "") and "dummy" not in engine_flags("demo", "")
    assert engine_flags(str(tmp_path), "--device cpu") == ["--model", str(tmp_path), "--device", "cpu"]


class FakeEngine:
    def __init__(self, *_: Any, folder: Path, prefix: Any) -> None:
        self.folder = folder

    async def __aenter__(self) -> tuple[None, str]:
        return None, str(self.folder)

    async def __aexit__(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(("new_ms", "code", "num_rounds"), [(1.9, 1, 4), (1.76, 0, 2)])
def test_engines_are_measured_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], new_ms: float, code: int, num_rounds: int
) -> None:
    """A loss is measured again before it becomes the exit code; requests of each round are new."""
    seeds: list[int] = []
    order = []

    async def measure(run: str, url: str, seed: int) -> dict[str, float]:
        seeds.append(seed)
        order.append(Path(url).name)
        return {"tpot_ms": 1.75 if url.endswith("old") else new_ms}

    monkeypatch.setattr(compare, "engine", FakeEngine)
    monkeypatch.setattr(compare, "measure", measure)
    (tmp_path / "old").mkdir()
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "old"), "--new", str(tmp_path / "new"), "--models", "demo", "--runs", "one", "--rounds", "2"])
    assert end.value.code == code and order == ["old", "new", "new", "old"] * (num_rounds // 2)
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == num_rounds
    assert f"{new_ms:.4g}" in capsys.readouterr().out
