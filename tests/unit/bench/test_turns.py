"""Two engines that are measured in turn."""

import json
from pathlib import Path

import pytest

from bench.turns import figures, main


def test_figures_of_each_kind_of_benchmark() -> None:
    """Red if a load, a probe or rows have no figures, or words among them are taken for numbers."""
    load = {"requests_per_s": 2.5, "ttft_ms": {"p50": 7.0, "p90": 9.0}, "failed": 0}
    points = [{"resolution": "720p", "images": 8, "ttft_sent_ms": 90.5}, {"resolution": "2k", "images": 8, "error": "too many"}]
    rows = [{"set": "random, 1", "with": 2.5, "accepted": "70%"}]
    found = dict(figures({"result": load})) | dict(figures({"points": points})) | dict(figures({"rows": rows}))
    assert found == {"requests_per_s": 2.5, "ttft_ms": 7.0, "720p x 8, ttft_ms": 90.5, "random, 1, with": 2.5}


@pytest.mark.nightly
def test_engines_are_measured_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Red if a round lacks an engine or a run, if an engine does not get flags of its own, or if no difference is shown."""
    flags = "--model demo --device cpu --kv-cache-memory-bytes 64M"
    run = "one: load --concurrency 1 --requests 2 --input-tokens 8 --output-tokens 8"
    engines = ["first=.", "second=. --served-model-name other"]
    main(["--flags", flags, "--engines", *engines, "--runs", run, "--rounds", "2", "--out", str(tmp_path)])
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")}
    assert files == {f"{name}/one-{number}.json" for name in ("first", "second") for number in (1, 2)}
    assert all(json.loads((tmp_path / file).read_text())["result"]["failed"] == 0 for file in files)
    lines = capsys.readouterr().out.splitlines()
    assert "difference" in lines[0] and all(line.rstrip(" |").endswith("%") for line in lines[2:]) and "tpot_ms" in "".join(lines)
