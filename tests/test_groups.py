"""`tests/conftest.py`: which tests run in one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = """
import pytest

@pytest.fixture
def stack_of(): pass

@pytest.mark.parametrize("i", range(3))
def test_alone(i): pass

@pytest.mark.parametrize("i", range(3))
def test_shared(i, stack_of): pass
"""


def test_users_of_a_server_and_tests_of_a_file_run_in_one_process(tmp_path: Path) -> None:
    """pytest 9.2 once made xdist's groups ineffective without a message."""
    for name in ("test_a.py", "test_b.py", "test_c.py"):
        (tmp_path / name).write_text(TESTS)
    unused = ("-p", "no:schemathesis", "-p", "no:langsmith_plugin")  # take seconds
    command = [sys.executable, "-m", "pytest", "-vv", "-n", "2", "-p", "tests.conftest", *unused]
    output = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True).stdout
    ran = re.findall(r"\[(gw\d)\].* PASSED .*(test_.\.py)::(\w+)", output)
    assert len(ran) == 18, output
    assert len({process for process, _, test in ran if test == "test_shared"}) == 1, output
    assert len({(process, file) for process, file, test in ran if test == "test_alone"}) == 3, output
