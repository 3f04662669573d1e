"""Tests over several processes: which of them run together, as `tests/conftest.py` has it."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.conftest import shared_by

ROOT = Path(__file__).parents[2]
TESTS = "import pytest\n\n@pytest.mark.parametrize('i', range(6))\ndef test(i): pass\n"


def test_a_file_stays_in_one_process(tmp_path: Path) -> None:
    """Red if every process starts the servers of every file: xdist's own groups went unheeded for a while, and nobody noticed."""
    names = ["test_a.py", "test_b.py", "test_c.py"]
    for name in names:
        (tmp_path / name).write_text(TESTS)
    without = [option for plugin in ("schemathesis", "langsmith_plugin") for option in ("-p", f"no:{plugin}")]  # which take seconds
    command = [sys.executable, "-m", "pytest", "-vv", "-n", "2", "-p", "tests.conftest", *without]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    output = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120).stdout
    ran = re.findall(r"\[(gw\d)\].* PASSED .*(test_.\.py)::", output)
    assert len(ran) == 18, output
    assert len(set(ran)) == len(names), output


def test_what_is_shared() -> None:
    """Red if two processes may use one GPU, or the same ports."""
    assert shared_by("tests/gpu/test_moe.py::test_a[1-tests/x]") == shared_by("tests/gpu/test_guard.py::test_b") == "gpu"
    assert shared_by("tests/e2e/test_replicas.py::test") == shared_by("tests/unit/engine/test_replicas.py::test")
    assert shared_by("tests/e2e/test_demo.py::test") != shared_by("tests/e2e/test_dp.py::test")
