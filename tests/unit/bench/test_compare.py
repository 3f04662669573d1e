"""Comparison of two versions, the table of `bench.guard`, and the bounds of the kernel benchmark."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import compare, guard
from bench.compare import compared, figures, gain, is_loss, main, rows_of
from bench.guard import PROBES, Target, stall
from bench.kernels import FORMATS, product_cases
from bench.processes import engine_flags
from bench.row import CELLS
from models.config.huggingface import read_config
from models.kernels.reference.backend import TorchBackend
from models.scaffold import SHAPES, write_model_folder

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
    seeds = []
    order = []

    async def run_benchmark(command: str, url: str, seed: int) -> dict[str, Any]:
        seeds.append(seed)
        order.append(Path(url).name)
        return {"result": {"errors": [], "tpot_ms": {"p50": 1.75 if url.endswith("old") else new_ms}}}

    monkeypatch.setattr(compare, "running_engine", FakeEngine)
    monkeypatch.setattr(compare, "run_benchmark", run_benchmark)
    (tmp_path / "old").mkdir()
    (tmp_path / "new").mkdir()
    monkeypatch.chdir(tmp_path / "new")
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "old"), "--models", "demo", "--runs", "one", "--rounds", "2"])
    assert end.value.code == code and order == ["old", "new", "new", "old"] * (num_rounds // 2)
    assert seeds[::2] == seeds[1::2] and len(set(seeds)) == num_rounds
    assert f"{new_ms:.4g}" in capsys.readouterr().out


def target() -> Target:
    return Target("http://127.0.0.1:1", "demo", None, 1.0, None, idle_gap=0.01)


def test_names_are_those_of_one_probe_each() -> None:
    names = [name for name, _, _ in PROBES]
    assert len(set(names)) == len(names) and all(promised for name, promised, _ in PROBES if name != "idle engine")


async def test_a_stall_is_above_the_gap_of_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def longest(*_: object) -> tuple[float, float, str]:
        return 0.26, 0.02, "HTTP 401 x 7"

    monkeypatch.setattr(guard, "longest", longest)
    assert await stall(lambda _: asyncio.sleep(0, ""))(target()) == "0.250 s, /health 0.020 s; HTTP 401 x 7"


async def test_a_probe_that_fails_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(_: Target) -> str:
        raise ConnectionRefusedError("no server")

    async def measured(_: Target) -> str:
        return "3 MiB"

    monkeypatch.setattr(guard, "PROBES", (("a", "1", lambda: refused), ("b", "2", lambda: measured)))
    assert await guard.guard(target(), []) == [["a", "1", "not measured: no server"], ["b", "2", "3 MiB"]]
    assert await guard.guard(target(), ["b"]) == [["b", "2", "3 MiB"]]


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_operations_and_bytes(tmp_path: Path, num_tokens: int) -> None:
    write_model_folder(tmp_path, SHAPES["tiny"], weights="none", seed=0)
    text = read_config(tmp_path).text
    cases = {case.name: case for case in product_cases(text, TorchBackend(torch.device("cpu")), num_tokens)}
    layer = [case for name, case in cases.items() if name != "head" and ":" not in name]
    weights = text.hidden_size * ((2 * text.num_heads + 2 * text.num_kv_heads) * text.head_dim + 3 * text.intermediate_size)
    assert len(cases) == 1 + len(FORMATS) * len(layer) and sum(case.num_bytes for case in layer) == 2 * weights
    assert sum(case.flops for case in layer) == 2 * num_tokens * weights
    for case in layer:
        float8 = cases[f"float8: {case.name}"]
        assert (float8.flops, float8.num_bytes) == (case.flops / 2, case.num_bytes / 2)
        case.calls[0]()
        float8.calls[0]()
