"""The examples of the README, the quickstart, the guides and the page on Python, as written, against the demo model."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT, Engine

pytestmark = pytest.mark.clients

EXAMPLE = re.compile(r"<!-- run -->\n```(python|bash)\n(.*?)```", re.DOTALL)
OTHERS = [ROOT / name for name in ("README.md", "docs/quickstart.md", "docs/python.md", "docs/moving.md")]
PAGES = sorted([*OTHERS, *(ROOT / "docs/guides").glob("*.md")])
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, engine: Engine) -> None:
    examples = EXAMPLE.findall(page.read_text(encoding="utf-8"))
    assert examples
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for language, example in examples:
        command = [sys.executable if language == "python" else "bash", "-c", example.replace(ADDRESS, engine.url)]
        run = subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        for expected in re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE):
            assert expected in run.stdout.splitlines()
