"""The Python examples of the quickstart, the guides and the page on Python, as written, against the demo model."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.serving import ROOT, Engine

pytestmark = pytest.mark.clients

EXAMPLE = re.compile(r"<!-- run -->\n```python\n(.*?)```", re.DOTALL)
PAGES = sorted([ROOT / "docs/quickstart.md", ROOT / "docs/python.md", *(ROOT / "docs/guides").glob("*.md")])
ADDRESS = "http://127.0.0.1:8000"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_run(page: Path, engine: Engine) -> None:
    """Red if an example fails, or prints something else than its comment says."""
    examples = EXAMPLE.findall(page.read_text(encoding="utf-8"))
    assert examples
    for example in examples:
        command = [sys.executable, "-c", example.replace(ADDRESS, engine.url)]
        run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr[-2000:]
        for expected in re.findall(r"^print\(.*\)  # (.*)$", example, re.MULTILINE):
            assert expected in run.stdout.splitlines()
