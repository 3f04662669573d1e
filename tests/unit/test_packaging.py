"""What `pip install` carries: the engine and its demo, neither the demo's training nor tests nor results; one version; one command."""

import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import find_namespace_packages

from engine.serve import command
from engine.wire.config import VERSION

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FIND = PROJECT["tool"]["setuptools"]["packages"]["find"]
SHIPPED = find_namespace_packages(str(ROOT), include=FIND["include"], exclude=FIND["exclude"])  # as setuptools does for `packages.find`


def modules_of(package: str) -> list[Path]:
    return sorted((ROOT / package.replace(".", "/")).glob("*.py"))


def test_the_wheel_carries_neither_training_nor_tests_nor_results() -> None:
    assert not [package for package in SHIPPED if {"training", "tests", "results", "docs", "deploy"} & set(package.split("."))]
    backwards = "def backward", ".backward()", "torch.optim", "class Optimiser"
    for path in (path for package in SHIPPED for path in modules_of(package)):
        assert not [word for word in backwards if word in path.read_text()], path.relative_to(ROOT)


def test_the_version_stands_in_one_place() -> None:
    assert "version" in PROJECT["project"]["dynamic"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "engine.wire.config.VERSION"
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text()


def run_command(monkeypatch: pytest.MonkeyPatch, *words: str) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["mini-vlm", *words])
    with pytest.raises(SystemExit) as stopped:
        sys.exit(command())
    return stopped.value.code


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_the_command_passes_its_flags_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for names, words in ((["serve"], "engine.serve: "), (["bench", "load"], "--concurrency"), (["bench", "accuracy"], "--questions")):
        code = run_command(monkeypatch, *names, "--no-such-flag")
        error = capsys.readouterr().err
        assert code == 2 and "error: " in error and "--no-such-flag" in error and words in error, names


def test_the_command_prints_its_version(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(monkeypatch, "--version") == 0 and capsys.readouterr().out.split()[-1] == VERSION
