"""Child processes run this project's modules and the standard library's, never files of the working directory."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine import tethered
from engine.config import PACKAGE_ROOT, child_environment, python_command, share_environment
from engine.helper import Helper
from tests.unit.engine.failing_child import REASON
from tests.unit.engine.test_failed_start import end_of_failing_child

DECOY = "raise SystemExit('a file of the working directory was executed')\n"
NAMES = ("server.py", "engine.py", "queue.py", "json.py", "inspect.py", "models/__init__.py")


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    for name in NAMES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(DECOY)
    return tmp_path


def test_children_ignore_files_of_the_working_directory(decoys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervised, helper and tethered processes."""
    monkeypatch.chdir(decoys)
    monkeypatch.setenv("PYTHONPATH", os.pathsep)  # two empty entries: the working directory
    assert end_of_failing_child() == f"worker-0: {REASON}"
    environment = share_environment(0, 1, False)
    command = tethered.command(frozenset(os.sched_getaffinity(0)), "engine.cli", "--version")
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    async def start() -> None:
        helper = Helper("tests.unit.engine.echoing_helper")
        assert await helper.ask(b"a question", 60) == b"a question"
        await helper.close()

    asyncio.run(start())


def test_children_of_a_clone_that_is_not_installed_use_the_clone(decoys: Path, tmp_path: Path) -> None:
    """`-P` takes the clone from their search path."""
    clone = tmp_path / "clone"
    clone.mkdir()
    for package in ("engine", "models"):
        (clone / package).symlink_to(Path(PACKAGE_ROOT, package))
    code = f"""
import subprocess
from engine.config import child_environment, python_command
subprocess.run(python_command("inspect", "engine.config", "--details"), env=child_environment(), cwd={str(decoys)!r}, check=True)
"""
    run = subprocess.run([sys.executable, "-c", code], cwd=clone, capture_output=True, text=True, check=True)
    assert f"Origin: {clone / 'engine' / 'config.py'}" in run.stdout


def test_search_path_keeps_the_user_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"/some/library::{PACKAGE_ROOT}")
    for environment in (child_environment(), share_environment(0, 1, False)):
        assert environment["PYTHONPATH"] == f"{PACKAGE_ROOT}{os.pathsep}/some/library"
    assert python_command("engine.serve")[1:] == ["-P", "-m", "engine.serve"]
