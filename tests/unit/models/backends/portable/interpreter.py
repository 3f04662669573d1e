"""Triton's interpreter for tests of kernels: files that use it are run again in a process that has it on, see `conftest`."""

import importlib.util
import os
import subprocess
import sys

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # has to be set before triton is imported, so in a process of its own
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the process that a test of this file starts")
starts_interpreter = pytest.mark.skipif(INTERPRETED or importlib.util.find_spec("triton") is None, reason="needs triton")
UNUSED = ("langsmith_plugin", "schemathesis")  # plugins that take seconds to import


def run_interpreted(files: list[str]) -> None:
    """Runs the interpreted tests of `files`; AssertionError with their output if one fails, or if a file has none that ran."""
    without = [option for plugin in ("cacheprovider", *UNUSED) for option in ("-p", f"no:{plugin}")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-vv", "--noconftest", *without, *files],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=840,
    )
    passed = [line for line in run.stdout.splitlines() if " PASSED" in line]
    all_ran = all(any(f"{os.path.basename(file)}::" in line for line in passed) for file in files)
    assert run.returncode == 0 and all_ran, run.stdout + run.stderr
