"""ruff, mypy and the installation. mypy takes a minute of one core: this file comes first, while the other process runs other tests."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def run(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]


def test_mypy() -> None:
    run("mypy")


def test_ruff() -> None:
    run("ruff", "check", ".")


def test_installation() -> None:
    wanted = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["test"]]
    found = {one.name: importlib.metadata.version(one.name) for one in wanted}
    assert not {one.name: found[one.name] for one in wanted if not one.specifier.contains(found[one.name], prereleases=True)}
    for target in PROJECT["scripts"].values():
        assert callable(importlib.metadata.EntryPoint("script", target, "console_scripts").load())
