"""Tests of kernels in Triton's interpreter.

TRITON_INTERPRET must be set before Triton is imported: `test_interpreter.py` runs tests with the decorator `interpreted` in other
processes, those marked `in_gate` in the gate, all in the suite `kernels`.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
in_gate: Any = pytest.mark.gate if INTERPRETED else ()  # marks the small case of a kernel that the gate runs
starts_interpreter = pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs triton")
UNUSED = ("cacheprovider", "langsmith_plugin", "schemathesis")  # plugins that take seconds to import


def interpreted(test: Callable[..., None] | None = None, *, gate: bool = False) -> Any:
    """Decorator: the test runs in the interpreter, in the suite `kernels` and, with `gate`, also in the gate."""
    if test is None:
        return lambda test: interpreted(test, gate=gate)
    marked = pytest.mark.kernels(pytest.mark.skipif(not INTERPRETED, reason="test_interpreter.py runs it")(test))
    return in_gate(marked) if gate and INTERPRETED else marked


def run_interpreted(suite: str, *options: str) -> None:
    """Run all interpreted tests with the mark `suite`. AssertionError if one fails, or if a file has none that ran."""
    files = [path for path in sorted(Path(__file__).parent.glob("test_*.py")) if "@interpreted" in path.read_text()]
    without = [option for plugin in UNUSED for option in ("-p", f"no:{plugin}")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-vv", "--noconftest", *without, "-m", suite, *options, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    passed = [line for line in run.stdout.splitlines() if "PASSED" in line]
    all_ran = all(any(f"{file.name}::" in line for line in passed) for file in files)
    assert run.returncode == 0 and all_ran, run.stdout + run.stderr
