"""The video benchmark: its clips, its bound, and a run against the real api and processor."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.video import compute_bound, expected, main, make_clip
from models.scaffold import SHAPES, write_model_folder
from tests.unit.server.stack import Stack, answer_text


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    write_model_folder(folder, SHAPES["tiny"], weights="none", seed=0)
    running = Stack(folder)
    yield running
    running.close()


def test_the_bound_and_the_tokens() -> None:
    """Published for a picture of 720p: 27 ms with its text of 1,000 tokens."""
    assert 20 < compute_bound(SHAPES["8B"], 1, 44 * 80, 880 + 200) < 27
    assert [expected("374", fps)[2] - 60 for fps in (1, 2, 4, 8)] == [2290, 4580, 9160, 13_040]
    assert expected("720p", 2)[2] - 60 == 8880
    assert make_clip(1, "tiny")[4:8] == b"ftyp"


@pytest.mark.e2e
@pytest.mark.parametrize("clients", [1, 2])
def test_a_run(stack: Stack, tmp_path: Path, capsys: pytest.CaptureFixture[str], clients: int) -> None:
    stack.scheduler.requests.clear()
    stack.scheduler.script = answer_text
    out = tmp_path / "video.json"
    flags = ["--clip", "tiny", "--fps", "2,4", "--requests", "3", "--clients", str(clients), "--seed", str(10 * clients), "--shape", "tiny"]
    main(["--url", stack.url, "--output-tokens", "8", "--json", str(out), *flags])
    rows = json.loads(out.read_text())["rows"]
    assert [row["fps"] for row in rows] == [2.0, 4.0] and all(row["load"]["failed"] == 0 for row in rows)
    assert "bound_ms" in capsys.readouterr().out
    encodings = [request.images[0].source.encoding for request in stack.scheduler.requests]
    assert encodings == ["rgb"] * 14  # two warm-ups, three clips asked about twice at two rates; the scheduler's stand-in holds nothing
